"""sim/, ptx/ and gpu/ hold tests for a process of their own (tests/l1_kernels/conftest.py)."""

from __future__ import annotations

from tests.l1_kernels.conftest import pytest_ignore_collect

__all__ = ["pytest_ignore_collect"]
