"""GELU (two kinds), ReLU, SiLU, and the gated product."""
