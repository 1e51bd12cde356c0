"""Floor 4: sparse models (paper, Section V)."""
