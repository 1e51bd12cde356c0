"""`env`: what a bug report needs. Each fact is found on its own, and one that cannot be had says why: this never fails."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from l2_dense_parallel.ranks import THREAD_VARIABLES, usable_cores
from l2_dense_parallel.world import World

PACKAGES = (
    "strata-inference numpy numba numba-cuda cupy-cuda12x cupy-cuda13x nvidia-nccl-cu12 nvidia-nccl-cu13 mpi4py mpich openmpi safetensors "
    "tokenizers gguf h5py ml_dtypes jinja2 greenlet typer rich"
).split()
SECONDS = 20  # for each question that is put to another process

# Asked in processes of their own: a broken driver or MPI may end the process that imports it.
GPUS = """
import cupy
runtime = cupy.cuda.runtime
print("CUDA runtime", runtime.runtimeGetVersion(), "driver", runtime.driverGetVersion())
for i in range(runtime.getDeviceCount()):
    about = runtime.getDeviceProperties(i)
    with cupy.cuda.Device(i):
        free, total = runtime.memGetInfo()
    print(f"GPU {i}: {about['name'].decode()}, compute {about['major']}.{about['minor']}, {free >> 20} of {total >> 20} MiB free")
pairs = [(i, j) for i in range(runtime.getDeviceCount()) for j in range(runtime.getDeviceCount()) if i != j]
apart = [f"{i} {j}" for i, j in pairs if not runtime.deviceCanAccessPeer(i, j)]
if pairs:
    print("GPUs reach each other's memory" + (f", but for {', '.join(apart)}" if apart else ""))
"""
NCCL = "from cupy.cuda import nccl; print(nccl.get_version())"
MPI = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"


def env(world: World) -> None:
    """Versions, GPUs, MPI, NCCL and limits: what a bug report needs."""
    if world.rank:
        return
    for name, find in FACTS:
        try:
            text = find()
        except Exception as error:  # noqa: BLE001 (a report on a broken machine must come out whole)
            text = f"unknown ({type(error).__name__}: {error})"
        first, *more = text.strip().splitlines() or [""]
        sys.stdout.write(f"{name + ':':<10} {first}\n" + "".join(f"{'':<10} {line}\n" for line in more))


def models_found() -> str:
    import models

    return "\n".join(models.__path__)


def versions() -> str:
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{name} -")
    return "\n".join(", ".join(found[i : i + 5]) for i in range(0, len(found), 5))


def processor() -> str:
    from l1_kernels.device import cpu_name, host_memory

    free, total = host_memory()
    return f"{cpu_name()}, {usable_cores()} usable; {free >> 20} of {total >> 20} MiB memory free"


def ask_python(code: str, module: str) -> Callable[[], str]:
    def ask() -> str:
        if importlib.util.find_spec(module) is None:
            return f"none ({module} is not installed)"
        # A launcher's variables would make a lone MPI process look for its fellows.
        alone = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI_", "PRTE_", "SLURM_", "HYDRA_", "MPI_"))}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS, env=alone)
        lines = (done.stdout if done.returncode == 0 else done.stderr).replace("\0", "").strip().splitlines()
        shown = lines if done.returncode == 0 else [f"not usable ({lines[-1] if lines else f'status {done.returncode}'})"]
        return "\n".join(line[:160] for line in shown[:12])

    return ask


def launchers() -> str:
    return ", ".join(f"{name} {path}" for name in ("mpirun", "mpiexec", "srun") if (path := shutil.which(name))) or "none"


def limits() -> str:
    def shown(kind: int, unit: int = 1) -> str:
        soft, _ = resource.getrlimit(kind)
        return "unlimited" if soft == resource.RLIM_INFINITY else str(soft // unit)

    disk = shutil.disk_usage("/dev/shm").free >> 20 if Path("/dev/shm").exists() else 0
    return f"memlock {shown(resource.RLIMIT_MEMLOCK, 1024)} KiB, open files {shown(resource.RLIMIT_NOFILE)}, /dev/shm {disk} MiB free"


def threads() -> str:
    return ", ".join(f"{name}={os.environ.get(name, '-')}" for name in THREAD_VARIABLES)


FACTS: list[tuple[str, Callable[[], str]]] = [
    ("models", models_found),
    ("python", lambda: f"{platform.python_version()} at {sys.executable}"),
    ("system", platform.platform),
    ("packages", versions),
    ("cpu", processor),
    ("threads", threads),
    ("limits", limits),
    ("gpu", ask_python(GPUS, "cupy")),
    ("nccl", ask_python(NCCL, "cupy")),
    ("mpi", ask_python(MPI, "mpi4py")),
    ("launchers", launchers),
]
