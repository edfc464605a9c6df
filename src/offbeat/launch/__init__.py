"""Start processes and carry typed calls to them; knows no RL."""
