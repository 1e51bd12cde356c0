"""A sum over GPUs that reach each other's memory, in one launch."""
