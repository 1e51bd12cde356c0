"""Rotary positions (RoFormer, arXiv 2104.09864)."""
