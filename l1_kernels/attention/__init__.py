"""Softmax attention over the cache."""
