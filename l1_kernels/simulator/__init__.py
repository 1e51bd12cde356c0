"""A simulator of numba.cuda: every CUDA thread is a greenlet, all of them on one thread of the operating system.

So a debugger steps through a kernel, a run is the same every time, and warps are real: lanes meet at a shuffle, a vote or an
`mma`, which is computed once for all of them. All blocks of a launch can be alive side by side, so a barrier over the grid,
made of acquire and release flags, works too. A thread that never waits costs no switch at all.

    scheduler.py    which thread runs next: launches, blocks, threads, waiting, deadlock
    meeting.py      where threads meet: warp operations and block barriers; refuses divergence
    memory.py       shared and local arrays, filled with poison; atomics
    tensor_core.py  mma.sync, from registers to matrices and back
    device_math.py  `math` with a device's arithmetic
    api.py          the names of numba.cuda, over all of these

It needs NumPy and greenlet; numba it does not need.
"""
