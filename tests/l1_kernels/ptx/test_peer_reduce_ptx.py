"""What the sums over peers compile to: numbers before their flag, flags at system scope, nothing of this step read before the kernel's turn."""

from __future__ import annotations

import re

import pytest
from numba import types

from l1_kernels.carrier import F32_1D, array_type
from l1_kernels.compile_ptx import assemble, compile_to_ptx, find_ptxas, most_threads
from l1_kernels.peer_reduce import gpu, norm
from tests.l1_kernels.peer_reduce_checks import make_all_norms

pytestmark = pytest.mark.ptx
SUMS = {name: (kernel, signature) for name, kernel, signature in gpu.variants()}
NORMS = {name: (kernel, signature) for name, kernel, signature in norm.variants()}
LOAD = re.compile(r"ld\.global[.\w]*")


@pytest.mark.parametrize("name", [*SUMS, *NORMS])
def test_an_exchange(name: str) -> None:
    text = compile_to_ptx(*(SUMS | NORMS)[name], "90")
    before, after = text.split("griddepcontrol.wait;")
    vectors = LOAD.findall(before)  # a norm's gain and shift, two times 16 bytes a thread; a sum has nothing that waits for nobody
    assert vectors == (["ld.global.v4.f32"] * 4 if name in NORMS else [])
    push, barrier, flag, look = (after.index(word) for word in ("st.global.v4.f32", "bar.sync", "st.release.sys.global.s32", "ld.acquire.sys.global.s32"))
    assert push < barrier < flag < look < after.index("bar.sync", look)
    assert after.count("st.release.sys.global.s32") == 1 and "trap;" in after
    assert ".local" not in text, "numbers that should be in registers are in memory"


def test_a_sum_has_two_barriers() -> None:
    for kernel, signature in SUMS.values():
        assert compile_to_ptx(kernel, signature, "90").count("bar.sync") == 2


@pytest.mark.parametrize("ranks", range(2, 9))
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_registers_of_the_widest_row(kind: str, ranks: int) -> None:
    """1024 threads are 64 registers each at most, and nothing may be put by for want of them."""
    _, _, signature = next(norm.variants())
    kernel = norm.make_norm_sum(ranks, kind, "bf16", 1024)
    ptxas = find_ptxas()
    assert ptxas is not None and most_threads(kernel) == 1024
    used = assemble(compile_to_ptx(kernel, signature, "90"), "90", ptxas)
    assert used.fit(1024) and used.spilled_bytes == 0


@pytest.mark.parametrize("ranks", [4, 8])
def test_the_check_s_own_kernel_can_be_launched(ranks: int) -> None:
    """A GPU refused it once: it calls the same functions and was not bound to its threads."""
    f32, i32 = types.float32, types.int32
    arrays = types.Array(f32, 4, "C")
    signature = (
        arrays, arrays, F32_1D, F32_1D, types.boolean, f32, array_type("bf16", 4), types.Array(i32, 2, "C"), gpu.I64_1D, types.int64,
    )  # fmt: skip
    kernel = make_all_norms(ranks, "layernorm", "bf16", 1024)
    ptxas = find_ptxas()
    assert ptxas is not None and most_threads(kernel) == 1024
    assert assemble(compile_to_ptx(kernel, signature, "90"), "90", ptxas).fit(1024)
