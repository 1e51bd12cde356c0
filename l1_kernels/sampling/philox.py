"""Philox4x64 (Salmon et al., SC 2011) in a kernel: the number in [0, 1) that belongs to (seed, prompt, step).

Ten rounds of two 64-bit products over the counter (step in its last word), under the key (seed, prompt). NumPy's generator
counts the first word up before it draws, so its first number is that of counter (1, 0, 0, step): the same here.
Everything is put together from 32-bit halves, whose products and sums fit into 64 bits.
"""

from __future__ import annotations

import numpy as np

from l1_kernels.cuda_api import cuda

HALF, BITS, ELEVEN = np.uint64(0xFFFFFFFF), np.uint64(32), np.uint64(11)
MULTIPLY_0, MULTIPLY_1 = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)
WEYL_0, WEYL_1 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B)
ROUNDS, ZERO, ONE = 10, np.uint64(0), np.uint64(1)
STEP = 2.0**-53  # of a float64 in [0, 1)


@cuda.jit(device=True)
def add(a, b):
    """a + b, uint64, wrapping."""
    low = (a & HALF) + (b & HALF)
    high = (a >> BITS) + (b >> BITS) + (low >> BITS)
    return ((high & HALF) << BITS) | (low & HALF)


@cuda.jit(device=True)
def multiply(a, b):
    """a * b -> (high, low) 64 bits of the 128."""
    a0, a1, b0, b1 = a & HALF, a >> BITS, b & HALF, b >> BITS
    low = a0 * b0
    middle = a1 * b0 + (low >> BITS)
    other = a0 * b1 + (middle & HALF)
    return a1 * b1 + (middle >> BITS) + (other >> BITS), ((other & HALF) << BITS) | (low & HALF)


@cuda.jit(device=True)
def uniform(seed, prompt, step):
    """float64 in [0, 1) of three uint64."""
    c0, c1, c2, c3 = ONE, ZERO, ZERO, step
    k0, k1 = seed, prompt
    for _ in range(ROUNDS):
        high0, low0 = multiply(MULTIPLY_0, c0)
        high1, low1 = multiply(MULTIPLY_1, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = add(k0, WEYL_0), add(k1, WEYL_1)
    return np.float64(c0 >> ELEVEN) * STEP
