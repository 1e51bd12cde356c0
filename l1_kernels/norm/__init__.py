"""LayerNorm, RMSNorm, and the RMS norms of query and key heads."""
