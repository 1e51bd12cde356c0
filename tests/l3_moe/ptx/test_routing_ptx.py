"""What the routing kernels compile to: no spills, registers for the blocks wanted, accesses of 16 bytes, one barrier over the grid."""

from __future__ import annotations

from typing import Any

import pytest

from l1_kernels.compile_ptx import CAPABILITIES, assemble, compile_to_ptx, find_ptxas, front_end
from l3_moe.routing import gpu, layout, product

pytestmark = pytest.mark.ptx
TABLES = {name: (kernel, signature) for name, kernel, signature in gpu.variants()}
LAYOUT = {name: (kernel, signature) for name, kernel, signature in layout.variants()}
PRODUCT = {name: (kernel, signature) for name, kernel, signature in product.variants()}


@pytest.fixture(scope="module")
def ptxas() -> str:
    path = find_ptxas()
    assert path is not None, "no ptxas: install numba-cuda[cu12]"
    return path


@pytest.mark.parametrize("name", [*TABLES, *LAYOUT, *PRODUCT])
def test_a_kernel(name: str, ptxas: str) -> None:
    """Nothing spilled, room for the blocks that are wanted, and nothing read before the launch's turn but the gate, which nobody writes."""
    make = front_end(*(TABLES | LAYOUT | PRODUCT)[name], CAPABILITIES[0])
    for cc in CAPABILITIES:
        text = make((int(cc[0]), int(cc[1:])))
        used = assemble(text, cc, ptxas)
        wide = name in TABLES and not name.startswith("tables_512")
        threads, blocks = 512 if wide else 256, 4 if name in LAYOUT else 1 if name in PRODUCT else 2
        assert used.spilled_bytes == 0 and ".local" not in text
        assert used.registers * threads * blocks <= 1 << 16
    assert text.count("griddepcontrol.wait") == 1
    before = text[: text.index("griddepcontrol.wait")]
    assert "ld.global" not in before and ("cp.async" in before) == (name in PRODUCT)
    assert text.count("atom.acq_rel.gpu.global.add.s32") == (1 if name in TABLES else 0)  # the barrier over the grid


@pytest.mark.parametrize(("across", "tiles"), [(2, 8), (4, 4), (8, 2)])
def test_three_products_of_a_tile(across: int, tiles: int) -> None:
    """x1 w1 + x1 w2 + x2 w1 for two tiles of 16 tokens and `tiles` of 8 experts, and one load of 16 bytes for 4 numbers of a row: of 16 k,
    or, where the compiler unrolls it, of a stage's two times 16."""
    text = compile_to_ptx(product.make_product(across), PRODUCT["gate_32_tokens"][1], "90")
    times = text.count("mma.sync.aligned.m16n8k16") / (3 * 2 * tiles)
    assert times in (1, 2) and text.count("ld.shared.v4.u32") == (4 + tiles) * times


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
