"""Generation: the embedded engine, its server process, and the clients the controller uses."""
