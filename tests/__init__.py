"""Tests mirror the packages; house/ holds those of the repository itself, equivalence/ the central one."""
