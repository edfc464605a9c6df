"""How the trainer's weights reach the generators: published by one, staged and committed by all."""
