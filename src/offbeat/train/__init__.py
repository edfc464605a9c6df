"""Training: the actor, its engine and batches, its process, and the client of the controller."""
