"""Routing by tables (paper, Section V-C): the tables themselves, and the two layout transformations over them.

    reference.py    the specification, in NumPy
    cpu.py          numba twins for the CPU, with cpu_launch.py
    gpu.py          tables in one launch (top_k.py: a token's choice), layout.py dispatch and combine, product.py the gate; with gpu_launch.py
    check.py        which arguments are refused
"""
