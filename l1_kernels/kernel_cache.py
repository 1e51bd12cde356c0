"""Where numba keeps the CPU kernels that it has compiled, so that only the first run waits for them.

numba itself looks for a folder that it may write: NUMBA_CACHE_DIR, then beside the source, then the user's cache. Where
there is none (an installation that root owns, read by a user without a home, as in many containers) it refuses to
compile at all. Then a folder of our own in the temporary directory takes their place. What lies there is loaded as code,
so it must be this user's, and nobody else's to write.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

from l1_kernels.errors import UserError

PACKAGE = Path(__file__).parent


def kernel_cache(environ: MutableMapping[str, str] = os.environ, package: Path = PACKAGE) -> Path | None:
    """The folder that numba will use, by its own rules; None where it finds none."""
    asked = environ.get("NUMBA_CACHE_DIR")
    users = Path(environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "numba"
    return next((folder for folder in ([Path(asked)] if asked else []) + [package, users] if can_write(folder)), None)


def ensure_kernel_cache(environ: MutableMapping[str, str] = os.environ, package: Path = PACKAGE) -> None:
    """Give numba a folder in NUMBA_CACHE_DIR where it finds none. Call it before numba is imported.

    Raises UserError where nothing at all can be written."""
    if kernel_cache(environ, package) is not None:
        return
    try:
        environ["NUMBA_CACHE_DIR"] = str(private_folder(Path(tempfile.gettempdir())))
    except OSError:
        raise UserError("no folder can be written, and compiled kernels need one: set NUMBA_CACHE_DIR to a folder that can be") from None


def can_write(folder: Path) -> bool:
    """Whether files can be made in `folder`, itself made where it is not there yet."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def private_folder(parent: Path) -> Path:
    """The same folder of this user's in every run; if another user has taken its name, one for this run only."""
    folder = parent / f"strata-kernels-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
        return folder
    return Path(tempfile.mkdtemp(prefix=folder.name + "-", dir=parent))
