"""Data: rows, their columns, the endless seeded stream of prompts, and the tokenizer."""
