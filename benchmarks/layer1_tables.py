"""The tables of docs/layer1.md, made from result files and from the code: no number is typed there.

    python -m benchmarks.layer1_tables                  prints them
    python -m benchmarks.layer1_tables --write          puts them into the page, between <!-- NAME --> and <!-- /NAME -->
    python -m benchmarks.layer1_tables floor --gb-s 3350     one of them, for another memory
    python -m benchmarks.layer1_tables barriers --warps 16

`barriers` compiles two kernels (the extra cuda12, no GPU); where that cannot be done it is left as it is.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "layer1.md"
RESULTS = Path(__file__).parent / "results"
MODELS = ("gpt2-xl", "gpt-neo-2.7b", "gpt-j-6b", "gpt-13b", "gpt-neox-20b")
WARPS, POWERS = (2, 8, 32), (2, 4, 8, 16, 32)  # of the table; what can be asked for
LARGE = 64 << 20


def result(name: str) -> dict[str, Any] | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *map(list, rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def floor(gb_s: float | None = None) -> str:
    """Bytes of weights that a decode step reads, in fp16, and the time that takes."""
    from math import prod

    from l2_dense_parallel.slicing import global_tensors, layer_tensors
    from models.presets import preset

    measured = result("kernels")
    assert measured is not None
    gb_s = gb_s or measured["read_gb_s"]
    rows = []
    for name in MODELS:
        config = preset(name)
        layer = sum(prod(t.whole_shape) for t in layer_tensors(config, 0).values() if t.matrix)
        head = prod(global_tensors(config)["embed.tokens" if config.tie_embeddings else "head.weight"].whole_shape)
        size = 2 * (config.num_layers * layer + head)
        kv = 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim
        rows.append([name, str(config.num_layers), f"{layer * 2 / 1e6:.0f}", f"{head * 2 / 1e6:.0f}", f"{size / 1e9:.2f}", f"{kv / 1e3:.0f}", f"{size / gb_s / 1e6:.2f}"])
    head_line = ["model", "layers", "MB a layer", "MB of the head", "GB a step", "KB of keys and values a token seen", f"floor, ms at {gb_s:.0f} GB/s"]
    return table(head_line, rows)


def ladder() -> str:
    """GB/s of weights, rung by rung, in the order of the result file, which is the ladder's."""
    found = result("kernels")
    assert found is not None
    shapes = list(dict.fromkeys((row["outputs"], row["inner"]) for row in found["ladder"]))
    rates = {(row["rung"], row["outputs"], row["inner"]): row["gb_s"] for row in found["ladder"]}

    reading = found.get("ladder_run", found)["read_gb_s"]  # the ladder may come from a run of its own

    def cell(rung: str, shape: tuple[int, int]) -> str:
        rate = rates[rung, *shape]
        return f"{rate:.0f} ({100 * rate / reading:.0f} %)"

    rows = [[f"`{rung}`", *(cell(rung, shape) for shape in shapes)] for rung in dict.fromkeys(row["rung"] for row in found["ladder"])]
    title = f"{found['gpu']}, batch 1, fp16: GB/s of weights (% of the {reading:.0f} that reading alone reached)"
    return title + "\n\n" + table(["rung", *(f"{outputs} x {inner}" for outputs, inner in shapes)], rows)


def gemms() -> str:
    """The tuned kernels against the better of cuBLAS and cuBLASLt, geometric means."""
    from benchmarks.kernels import mean

    found = result("kernels")
    assert found is not None
    rows = []
    for dtype, tokens in sorted({(row["dtype"], row["tokens"]) for row in found["rows"]}):
        some = [row for row in found["rows"] if (row["dtype"], row["tokens"]) == (dtype, tokens)]
        inner = [row for row in some if not row["name"].endswith("head")]

        def against(rows: list[dict[str, Any]]) -> str:
            ratios = [row["cublas_us"] / row["ours_us"] for row in rows if row["cublas_us"]]
            return f"{mean(ratios):.2f}" if ratios else "-"

        def bound(rows: list[dict[str, Any]], gb_s: float = found["read_gb_s"]) -> str:
            return f"{mean([100 * row['bytes'] / gb_s / 1e3 / row['ours_us'] for row in rows]):.0f}"

        large = [row for row in some if row["bytes"] >= LARGE]
        rows.append([dtype, str(tokens), str(len(some)), against(some), against(inner), bound(some), bound(large)])
    return table(["dtype", "batch", "GeMMs", "x cuBLAS", "without heads", "% of bound", "64 MB and more, % of bound"], rows)


def barriers(warps: Iterable[int] = WARPS) -> str:
    """`bar.sync` and shuffles in the PTX of the two reductions, by warps of a block."""
    from l1_kernels.carrier import F32_1D, F32_2D
    from l1_kernels.compile_ptx import compile_to_ptx
    from l1_kernels.sbi_gemm.layout import packed_type
    from l1_kernels.sbi_gemm.transpose import make_transpose
    from l1_kernels.sbi_gemm.tree import make_tree

    signature = (F32_2D, packed_type("fp16", 1), F32_1D, F32_2D)
    rows = []
    for count in warps:
        texts = [compile_to_ptx(make("fp16", 1, count), signature, "90") for make in (make_tree, make_transpose)]
        rows.append([str(count), *(str(text.count(word)) for text in texts for word in ("bar.sync", "shfl.sync"))])
    return table(["warps W", "tree: bar.sync", "shfl.sync", "transpose: bar.sync", "shfl.sync"], rows)


def regions() -> str:
    """Each region's gain, and the steps' (benchmarks/fig10a.py)."""
    found = result("fig10a")
    if found is None:
        return "Not measured yet: `python -m benchmarks.fig10a` on a GPU makes the file that this table is of."
    steps = table(
        ["model", "batch", "stage", "launched, ms", "as a graph, ms", "bound, ms"],
        [[r["model"], str(r["batch"]), r["stage"], f"{r['launched_ms']:.2f}", f"{r['graph_ms']:.2f}", f"{r['bound_ms']:.2f}"] for r in found["steps"]],
    )
    if not found["regions"]:
        return f"{found['machine']['gpu']}\n\n{steps}"
    alone = table(
        ["model", "batch", "region", "unfused, us", "fused, cuBLAS", "fused, SBI-GeMM", "bound", "gain", "paper"],
        [
            [r["model"], str(r["batch"]), r["region"], *(f"{r[s + '_us']:.1f}" for s in ("unfused", "fused", "sbi")), f"{r['bound_us']:.1f}",
             f"{r['gain']:.2f}x", f"{r['paper_gain']}x"]
            for r in found["regions"]
        ],
    )  # fmt: skip
    return f"{found['machine']['gpu']}\n\n{steps}\n\n{alone}"


PARTS: dict[str, Callable[..., str]] = {"floor": floor, "ladder": ladder, "gemms": gemms, "regions": regions, "barriers": barriers}


def part_of(page: str, name: str) -> str:
    """What stands between the marks. KeyError where the page has none of that name."""
    found = re.search(f"(?<=<!-- {name} -->\n).*?(?=<!-- /{name} -->)", page, re.DOTALL)
    if found is None:
        raise KeyError(f"{PAGE.name} has no part {name}")
    return found[0].removesuffix("\n")


def filled(page: str, name: str, text: str) -> str:
    part_of(page, name)
    before, rest = page.split(f"<!-- {name} -->\n", 1)
    return f"{before}<!-- {name} -->\n{text}\n<!-- /{name} -->{rest.split(f'<!-- /{name} -->', 1)[1]}"


def compiles() -> bool:
    return importlib.util.find_spec("numba_cuda") is not None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], prog="python -m benchmarks.layer1_tables")
    parser.add_argument("part", nargs="*", choices=[[], *PARTS], help="which; default all")
    parser.add_argument("--write", action="store_true", help="into docs/layer1.md")
    parser.add_argument("--gb-s", type=float, help="floor: bandwidth; default the measured one")
    parser.add_argument("--warps", type=int, action="append", choices=POWERS, help="barriers: repeatable; default all")
    given = parser.parse_args()
    more: dict[str, dict[str, Any]] = {"floor": {"gb_s": given.gb_s}, "barriers": {"warps": given.warps or WARPS}}
    page = PAGE.read_text(encoding="utf-8")
    for name in given.part or PARTS:
        if name == "barriers" and not compiles():
            continue
        text = PARTS[name](**more.get(name, {}))
        page = filled(page, name, text) if given.write else page
        print(f"{name}\n\n{text}\n")
    if given.write:
        PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
