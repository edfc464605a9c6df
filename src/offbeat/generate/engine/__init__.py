"""The embedded engine: continuous batching over a slot KV cache, on transformers' models."""
