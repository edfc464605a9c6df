"""Hugging Face models as offbeat runs them: loading, attention over packed rows, tiny models, GGUF import."""
