"""x W^T + b: where the bytes of a decode step are."""
