"""Python's `math` as a device computes it: no exceptions but infinities and NaN, and a float32 for a float32.

A function that gives integers or takes several arguments (floor, ceil, pow, ...) behaves likewise; constants are Python's.
"""

from __future__ import annotations

import math as _math
from typing import Any

import numpy as np

_NUMPY = {
    "acos": "arccos", "acosh": "arccosh", "asin": "arcsin", "asinh": "arcsinh", "atan": "arctan", "atan2": "arctan2",
    "atanh": "arctanh", "pow": "power",
}  # fmt: skip
_INFINITE = {"lgamma", "gamma", "erf", "erfc"}  # NumPy has none of these; out of range they are infinite


def _device(name: str) -> Any:
    host = getattr(_math, name)
    numpy_function = getattr(np, _NUMPY.get(name, name), None)

    def function(*arguments: Any) -> Any:
        try:
            result = host(*arguments)
        except (OverflowError, ValueError, ZeroDivisionError):
            if numpy_function is not None:
                with np.errstate(all="ignore"):
                    return numpy_function(*arguments)
            result = _math.inf if name in _INFINITE else _math.nan
        if type(result) is float:
            return np.float32(result) if type(arguments[0]) is np.float32 else np.float64(result)
        return result

    function.__name__ = name
    function.__doc__ = host.__doc__
    return function


def __getattr__(name: str) -> Any:
    value = getattr(_math, name)
    if callable(value):
        value = _device(name)
        globals()[name] = value
    return value
