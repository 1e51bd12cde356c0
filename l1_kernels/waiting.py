"""How numba's threads wait for the next parallel loop; import it before numba runs its first one.

numba's OpenMP layer (GNU's) is the one for us: a parallel loop of nothing costs 3 us on 2 cores, 60 us with `workqueue`.
But by default a thread that is done spins for milliseconds, and a BLAS call that follows gets half a core: a prompt's
attention (numba, BLAS, numba, ...; 1024 tokens) took 360 ms instead of 20. Without spinning a loop costs 25 us more where
waking a thread is dear (virtual machines), a quarter of an int8 decode step. 3000 rounds bridge the gap between the loops of
a step and are over in about 0.1 ms. What the user sets in OMP_WAIT_POLICY or GOMP_SPINCOUNT stays.
"""

from __future__ import annotations

import os

SPIN_ROUNDS = 3000

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_ROUNDS))  # read by libgomp when numba loads it
