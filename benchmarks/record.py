"""What every result file says beside its figures: machine, versions, commit; and how it is written."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
QUIET_LOAD = 1.5  # load average (one minute) before the first run, above which others are at work and a time says little
QUIET_CORES = 0.2  # cores that others may use during a run


def load() -> float:
    return round(os.getloadavg()[0], 2)


def warn_if_noisy() -> None:
    if load() > QUIET_LOAD:
        print(f"warning: the load average is {load()}; figures are of a machine that is not quiet", file=sys.stderr, flush=True)


class Others:
    """`with Others() as others: a process is run and waited for`: others.cores is how many cores' time went to what is
    neither this process nor its children, on average; None where the system does not say."""

    cores: float | None = None

    def __enter__(self) -> Others:
        self._start = time.perf_counter(), cpu_seconds()
        return self

    def __exit__(self, *_: object) -> None:
        (moment, before), after = self._start, cpu_seconds()
        if before is not None and after is not None:
            self.cores = round(max(0.0, (after - before) / (time.perf_counter() - moment)), 2)


def wait_for_quiet(limit: float, look: float = 2.0) -> None:
    """Until others use next to nothing for `look` seconds, or `limit` seconds are over."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        with Others() as others:
            time.sleep(look)
        if others.cores is None or others.cores <= QUIET_CORES:
            return


def cpu_seconds() -> float | None:
    """CPU time of all processes of the machine so far, less this one's and its children's."""
    try:
        user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
    except (OSError, ValueError):
        return None
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])


def circumstances(packages: tuple[str, ...]) -> dict[str, Any]:
    """Call it before measuring: it notes the load."""
    from l1_kernels.device import cpu_name

    cores = len(os.sched_getaffinity(0))
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {"cpu": cpu_name(), "cores": cores, "system": f"{platform.system()} {platform.machine()}", "load_before": load()},
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        "commit": git("rev-parse", "HEAD"),
        "changed_files": len((git("status", "--porcelain", "--untracked-files=no") or "").splitlines()),
        "command": " ".join(["python -m", "benchmarks." + Path(sys.argv[0]).stem, *map(without_folder, sys.argv[1:])]),
    }


def without_folder(argument: str) -> str:
    """Where things lie on this machine is nobody's business."""
    return f"PATH/{Path(argument).name}" if argument.startswith("/") else argument


def version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def git(*arguments: str) -> str | None:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def write(name: str, document: dict[str, Any], others: list[float | None]) -> Path:
    """results/NAME.json, there only when it is whole. others: cores that others used in each run that counts."""
    document["machine"]["others_cores"] = max((cores for cores in others if cores is not None), default=None)
    document["quiet"] = (document["machine"]["others_cores"] or 0.0) <= QUIET_CORES
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)
    return path
