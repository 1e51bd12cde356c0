"""SmolLM2-135M on a CPU: milliseconds for one more token at batch 1, beside the bound of the memory and beside a peer.

    python -m benchmarks.cpu_decode [--dtypes fp32,fp16,bf16,int8] [--rounds 3] [--peer-python PATH]

A step at batch 1 reads every weight once, so the bound is bytes of weights / bandwidth; the bandwidth is a read-only sum
over more than 1 GB, measured in each run by `strata bench`. The peer is Hugging Face transformers, in an interpreter of its
own that has torch, transformers, accelerate and gguf (benchmarks/peer_transformers.py). Each run is a process of its own, and ours and
the peer's take turns; the figure is the median over the rounds in which others left the
machine alone (over all of them where none was so quiet); all rounds are in the result file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.record import QUIET_CORES, ROOT, Others, circumstances, wait_for_quiet, warn_if_noisy, write


def main() -> None:
    options = arguments()
    warn_if_noisy()
    document = circumstances(("strata-inference", "numpy", "numba", "llvmlite"))
    ours: dict[str, list[dict[str, Any]]] = {dtype: [] for dtype in options.dtypes}
    peers: dict[str, list[dict[str, Any]]] = {dtype: [] for dtype in (options.peer_dtypes if options.peer_python else [])}
    for _ in range(options.rounds):
        for dtype, runs in ours.items():
            runs.append(run(strata(options, dtype), options.wait))
            say("strata", dtype, runs[-1])
        for dtype, runs in peers.items():
            runs.append(run(peer(options, dtype), options.wait))
            say("transformers", dtype, runs[-1])
    document["setting"] = {name: getattr(options, name) for name in ("model", "prompt_length", "new_tokens", "rounds")}
    document["strata"] = {dtype: summary(runs) for dtype, runs in ours.items()}
    document["transformers"] = {dtype: summary(runs) for dtype, runs in peers.items()}
    every = [found for runs in (*ours.values(), *peers.values()) for found in counted(runs)]
    path = write("cpu_decode", document, [found["others_cores"] for found in every])
    show(document)
    print(path.relative_to(ROOT))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], prog="python -m benchmarks.cpu_decode")

    def names(text: str) -> list[str]:
        return text.split(",")

    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtypes", type=names, default=names("fp32,fp16,bf16,int8"))
    parser.add_argument("--prompt-length", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--wait", type=float, default=0, help="seconds to wait, before each run, for others to leave the machine alone")
    parser.add_argument("--peer-python", type=Path, help="an interpreter that has torch, transformers, accelerate and gguf")
    parser.add_argument("--peer-dtypes", type=names, default=names("fp32"))
    return parser.parse_args()


def strata(options: argparse.Namespace, dtype: str) -> list[str]:
    sizes = ["--prompt-length", str(options.prompt_length), "--new-tokens", str(options.new_tokens)]
    return [sys.executable, "-m", "models.gpt", "bench", "--model", options.model, "--device", "cpu", "--dtype", dtype, *sizes, "--json"]


def peer(options: argparse.Namespace, dtype: str) -> list[str]:
    from models.find import find_model

    sizes = ["--prompt-length", str(options.prompt_length), "--new-tokens", str(options.new_tokens)]
    program = Path(__file__).with_name("peer_transformers.py")  # -I: this folder's modules are not the peer's
    return [str(options.peer_python), "-I", str(program), str(find_model(options.model)), "--dtype", dtype, *sizes]


def run(command: list[str], wait: float) -> dict[str, Any]:
    """Threads are each program's own choice: what a user would get."""
    wait_for_quiet(wait)
    with Others() as others:
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env={**os.environ, "TRANSFORMERS_OFFLINE": "1"})
    if done.returncode:
        raise SystemExit(f"benchmarks.cpu_decode: {' '.join(command)} ended with status {done.returncode}")
    return {**json.loads(done.stdout.splitlines()[-1]), "others_cores": others.cores}


def say(who: str, dtype: str, found: dict[str, Any]) -> None:
    print(f"{who} {dtype}: {found['token_ms']:.2f} ms/token (others used {found['others_cores']} cores)", file=sys.stderr, flush=True)


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the figures over the rounds that count, and all rounds."""
    figures = ("first_token_ms", "token_ms", "tokens_per_s", "gb_s", "bandwidth_gb_s", "percent_of_bound")
    medians = {name: round(median(run[name] for run in counted(runs)), 3) for name in figures if name in runs[0]}
    return {**medians, "rounds_counted": len(counted(runs)), "rounds": runs}


def counted(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The quiet ones, or all of them."""
    return [run for run in runs if (run["others_cores"] or 0.0) <= QUIET_CORES] or runs


def show(document: dict[str, Any]) -> None:
    setting = document["setting"]
    print(f"{setting['model']}, batch 1, prompt {setting['prompt_length']}, {setting['new_tokens']} new tokens")
    print(f"{'':14}{'dtype':6}{'ms/token':>10}{'tokens/s':>10}{'GB/s':>8}{'of GB/s':>9}{'% of bound':>12}{'others, cores':>15}")
    for who in ("strata", "transformers"):
        for dtype, found in document[who].items():
            speed = f"{found['gb_s']:8.2f}{found['bandwidth_gb_s']:9.2f}{found['percent_of_bound']:12.1f}" if "gb_s" in found else " " * 29
            others = max(run["others_cores"] or 0.0 for run in counted(found["rounds"]))
            print(f"{who:14}{dtype:6}{found['token_ms']:10.2f}{found['tokens_per_s']:10.2f}{speed}{others:15.2f}")


if __name__ == "__main__":
    main()
