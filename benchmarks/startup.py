"""From the start of a process to the bundled model's first token: what somebody waits who tries the command once.

    python -m benchmarks.startup [--rounds 5]

One process, the CPU, kernels compiled and files in memory already (one run before the first that counts).
`first_token_s` ends when the JSON document of a run of one token is read; `process_s` when the process has ended.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from statistics import median

from benchmarks.record import ROOT, Others, circumstances, wait_for_quiet, warn_if_noisy, write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], prog="python -m benchmarks.startup")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--wait", type=float, default=0, help="seconds to wait for others to leave the machine alone")
    options = parser.parse_args()
    warn_if_noisy()
    document = circumstances(("strata-inference", "numpy", "numba", "tokenizers", "typer"))
    once()
    wait_for_quiet(options.wait)
    with Others() as others:
        rounds = [once() for _ in range(options.rounds)]
    document["rounds"] = rounds
    for name in ("first_token_s", "process_s", "load_s", "forward_ms"):
        document[name] = round(median(found[name] for found in rounds), 3)
    path = write("startup", document, [others.cores])
    first, ended = document["first_token_s"], document["process_s"]
    print(f"first token {first:.2f} s after the process started (median of {options.rounds}); ended after {ended:.2f} s")
    print(path.relative_to(ROOT))


def once() -> dict[str, float]:
    """load_s and forward_ms are the run's own: reading weights, and the pass that gave the token."""
    command = [sys.executable, "-m", "models.gpt", "run", "--model", "shakespeare", "--device", "cpu", "--max-new-tokens", "1", "--json"]
    start = time.perf_counter()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        first_token = time.perf_counter() - start
        status = process.wait()
    ended = time.perf_counter() - start
    if status:
        raise SystemExit(f"benchmarks.startup: {' '.join(command)} ended with status {status}")
    timing = json.loads(line)["timing"]
    return {"first_token_s": first_token, "process_s": ended, "load_s": timing["load_s"], "forward_ms": timing["first_token_ms"]}


if __name__ == "__main__":
    main()
