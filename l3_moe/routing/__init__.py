"""Routing by tables (paper, Section V-C): the tables themselves, and the two layout transformations over them.

    reference.py    the specification, in NumPy
    cpu.py          numba twins for the CPU, with cpu_launch.py
    gpu.py          tables and dispatch in one launch, with top_k.py, a token's choice
    layout.py       dispatch alone, and combine
    product.py      the gate's product
    gpu_launch.py   the launches of these three
    check.py        which arguments are refused
"""
