"""Floor 5: families, checkpoints, tokenizer, generation loop, command line."""
