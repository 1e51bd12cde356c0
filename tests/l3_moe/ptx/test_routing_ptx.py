"""What the routing kernels compile to: no spills, registers that leave room for their blocks, accesses of 16 bytes, one barrier over the grid."""

from __future__ import annotations

from typing import Any

import pytest

from l1_kernels.compile_ptx import CAPABILITIES, assemble, compile_to_ptx, find_ptxas
from l3_moe.routing import gpu, layout
from l3_moe.routing.gpu import WARPS

pytestmark = pytest.mark.ptx
TABLES = {name: (kernel, signature) for name, kernel, signature in gpu.variants()}
LAYOUT = {name: (kernel, signature) for name, kernel, signature in layout.variants()}


@pytest.fixture(scope="module")
def ptxas() -> str:
    path = find_ptxas()
    assert path is not None, "no ptxas: install numba-cuda[cu12]"
    return path


@pytest.mark.parametrize("cc", CAPABILITIES)
@pytest.mark.parametrize("name", [*TABLES, *LAYOUT])
def test_no_spills(name: str, cc: str, ptxas: str) -> None:
    text = compile_to_ptx(*(TABLES | LAYOUT)[name], cc)
    used = assemble(text, cc, ptxas)
    threads, blocks = (32 * WARPS, 1) if name in TABLES else (256, 4)
    assert used.spilled_bytes == 0 and ".local" not in text
    assert used.registers * threads * blocks <= 1 << 16


@pytest.mark.parametrize("name", TABLES)
def test_one_barrier_over_the_grid(name: str) -> None:
    text = compile_to_ptx(*TABLES[name], "90")
    assert text.count("atom.acq_rel.gpu.global.add.s32") == 1 and text.count("griddepcontrol.wait") == 1
    before = text[: text.index("griddepcontrol.wait")]
    assert "ld.global" not in before, "nothing is read before the launch's turn"


def count(name: str, what: str) -> int:
    kernel: Any
    kernel, signature = LAYOUT[name]
    return compile_to_ptx(kernel, signature, "90").count(what)


@pytest.mark.parametrize(("dtype", "loads"), [("fp32", 1), ("fp16", 2), ("bf16", 2)])
def test_an_x_is_read_once(dtype: str, loads: int) -> None:
    """However many rows it goes to: outside of the loop over them."""
    name = f"dispatch_{dtype}_wide"
    assert count(name, "ld.global.v4.f32") == loads and count(name, "st.global.v4") >= 1
    assert count(name, "st.global.u16") == count(name, "st.global.f32") == 0


@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_combine_asks_for_all_rows_at_once(top_k: int) -> None:
    assert count(f"combine_{top_k}_wide_add", "ld.global.v4.f32") == top_k + 1
    assert count(f"combine_{top_k}_wide", "ld.global.v4.f32") == top_k
    assert count(f"combine_{top_k}_wide_add", "st.global.v4.f32") == 1
