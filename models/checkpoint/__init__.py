"""Readers of checkpoints: safetensors folders and GGUF files. A rank reads its own slice."""
