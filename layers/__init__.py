"""Floor 2: the transformer layer. Norm, attention, feed-forward, block, KV cache, written once for every device."""
