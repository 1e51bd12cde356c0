"""Sums in place."""
