"""Hugging Face models as offbeat runs them: loading, packed attention, tiny models, GGUF."""
