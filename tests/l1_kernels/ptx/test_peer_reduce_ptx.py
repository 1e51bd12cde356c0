"""What the sums over peers compile to: numbers before their flag, flags at system scope, nothing of this step read before the kernel's turn."""

from __future__ import annotations

import re

import pytest

from l1_kernels.compile_ptx import compile_to_ptx
from l1_kernels.peer_reduce import gpu, norm

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
