"""A whole decode step as one kernel: the regions of every layer, one after the other, on blocks that stay.

    program.py     the table of what is to be done: an operation a row, addresses and sizes
    kernel.py      the kernel: a warp that streams weights, and warps that work the table off
    activations.py what a GeMM reads besides weights: x, normalised or as it is, into shared memory
    gemm.py        tiles of weights out of the ring, on tensor cores
    attend.py      rotary, cache write and attention
    together.py    the barrier between operations
    recorder.py    `Regions` that note operations in a program in place of launching them

Why: a small model loses half its time at the boundaries between launches, some 4 us each, in which memory idles (README of
sbi_gemm). Weights depend on nothing, so here they keep coming while activations wait for each other.
"""
