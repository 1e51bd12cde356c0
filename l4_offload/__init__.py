"""Floor 4: where a layer's weights live (paper, Section VI)."""
