"""`python -m models.gpt` and the console script `strata`: the command line's outermost part.

Order matters here: threads are planned before NumPy is imported, the simulator is switched on before numba is, and MPI
starts after the arguments are read. So this file imports next to nothing by itself.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import TYPE_CHECKING, NoReturn

from l1_kernels.errors import UserError
from l2_dense_parallel.faults import run

if TYPE_CHECKING:
    from l2_dense_parallel.world import World


def main() -> NoReturn:
    """Run the command that sys.argv names, and end the process with its status (0, 2: the user can mend it, 1: our fault)."""
    run(lambda world: command_line(world, sys.argv[1:]))


def command_line(world: World, arguments: list[str], program: str = "strata") -> int:
    """program: the console script whose commands these are (models/cli/app.py)."""
    if world.rank:  # one rank speaks; errors have their own way (faults.py)
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (it lives as long as the process)
    if sys.stdout is None:
        raise UserError("standard output is closed; leave it open, or send it to /dev/null")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # text is text, on a terminal of any encoding

    from l1_kernels.device import prepare
    from l1_kernels.kernel_cache import ensure_kernel_cache

    prepare(requested_device(arguments))
    ensure_kernel_cache()
    from models.cli.app import application

    command = application(world, program)(args=arguments or ["--help"], prog_name=program, standalone_mode=False)
    if not callable(command):  # --help is all there was to do
        return int(command or 0)
    try:
        command()
        sys.stdout.flush()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and error.filename is None:  # of files we open, UserErrors tell
            raise UserError(f"standard output cannot be written ({error.strerror})") from None
        raise
    return 0


def requested_device(arguments: list[str]) -> str:
    """--device, before the arguments are parsed: numba reads the environment when it is imported."""
    device = "auto"
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=False):
        if argument == "--device":
            device = following
        elif argument.startswith("--device="):
            device = argument.removeprefix("--device=")
    return device


if __name__ == "__main__":
    main()
