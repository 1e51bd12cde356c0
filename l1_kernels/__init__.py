"""Floor 1: the kernels (paper, Section III). Each operation: NumPy reference, CPU twin where it pays, numba.cuda kernel."""
