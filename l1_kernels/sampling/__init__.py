"""From logits to the next tokens, without the host."""
