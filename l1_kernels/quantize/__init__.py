"""Activations in int8, a scale a token, with outliers kept: the A8 of W8A8."""
