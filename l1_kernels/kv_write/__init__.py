"""New keys and values into the cache."""
