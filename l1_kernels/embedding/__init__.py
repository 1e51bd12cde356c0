"""Rows of a table, one for each token."""
