"""The central test: the same prompt gives the same logits and tokens, however it is run (settings.py has the axes).

A failure names the case, the array, and by how much; `pytest -s` prints each setting's worst error and excused steps.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from l1_kernels.device import open_device
from l1_kernels.weight import Weight, decode
from l2_dense_parallel.collectives import NoCollective
from l2_dense_parallel.slicing import Shard
from models.loading import load_layers, open_checkpoint
from tests.conformance.check import cases, load_case
from tests.equivalence.judge import Verdict, judge
from tests.equivalence.oracle import as_held, slices
from tests.equivalence.run import CASES, build, check_setting, reference
from tests.equivalence.settings import CPU_SETTINGS, DECODERS, ENCODERS, GPU_SETTINGS, GRAPHED, SIM_SETTINGS, TWO_GPU_SETTINGS, Setting

ROOT = Path(__file__).parents[2]


def on_one_rank(setting: Setting) -> None:
    expect(setting, check_setting(setting, open_device(setting.device, fused=setting.fused, gemm=setting.gemm, overlap=setting.overlap)))


def on_ranks(setting: Setting, tmp_path: Path) -> None:
    file = tmp_path / "setting.json"
    file.write_text(json.dumps(setting.to_json()))
    command = ["mpirun", "-n", str(setting.ranks), sys.executable, "-m", "tests.equivalence.worker", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    verdict = next(line for line in done.stdout.splitlines() if line.startswith("{"))  # a launcher may print around it
    expect(setting, Verdict(**json.loads(verdict)))


def expect(setting: Setting, verdict: Verdict) -> None:
    print(f"{setting}: {verdict.summary()}")
    assert not verdict.faults, "\n".join(verdict.faults)
    assert len(verdict.worst) == len(setting.case_names())


@pytest.mark.parametrize("setting", [s for s in CPU_SETTINGS if s.ranks == 1], ids=str)
def test_cpu(setting: Setting) -> None:
    on_one_rank(setting)


@pytest.mark.mpi
@pytest.mark.parametrize("setting", [s for s in CPU_SETTINGS if s.ranks > 1], ids=str)
def test_cpu_ranks(setting: Setting, tmp_path: Path) -> None:
    on_ranks(setting, tmp_path)


@pytest.mark.sim
@pytest.mark.parametrize("setting", SIM_SETTINGS, ids=str)
def test_sim(setting: Setting) -> None:
    on_one_rank(setting)


@pytest.mark.gpu
@pytest.mark.parametrize("setting", GPU_SETTINGS, ids=str)
def test_gpu(setting: Setting) -> None:
    on_one_rank(setting)


@pytest.mark.gpu2
@pytest.mark.parametrize("setting", TWO_GPU_SETTINGS, ids=str)
def test_two_gpus(setting: Setting, tmp_path: Path) -> None:
    on_ranks(setting, tmp_path)


def test_every_conformance_case_is_in_the_harness() -> None:
    assert sorted([*DECODERS, *ENCODERS]) == [folder.name for folder in cases(CASES)]


@pytest.mark.parametrize(("tp", "es"), [(2, 2), (2, 1), (1, 2), (4, 2)])
def test_the_oracle_holds_what_ranks_hold(tp: int, es: int) -> None:
    """Of int8 matrices that are cut by columns, each rank's numbers with its own scales, at its columns."""
    checkpoint = open_checkpoint(CASES / "mixtral")
    whole, *held = (next(load_layers(checkpoint, "int8", part)) for part in (Shard(), *slices(tp, es)))
    joined = as_held(whole, held)
    for name, count in (("attn.out.weight", tp), ("moe.down.weight", es)):
        matrix, start = joined[name], 0
        assert isinstance(matrix, Weight) and matrix.shape == whole[name].shape
        assert matrix.dtype == ("int8" if count == 1 else "fp32")
        for part in (tensors[name] for tensors in held[: count if count > 1 else 0]):
            assert isinstance(part, Weight)
            end = start + part.shape[-1]
            np.testing.assert_array_equal(matrix.data[..., start:end], decode(part.data, part.dtype, part.scale))
            start = end
        assert start == (0 if count == 1 else matrix.shape[-1])
    assert joined["attn.qkv.weight"] is whole["attn.qkv.weight"] and joined["moe.up.weight"] is whole["moe.up.weight"]


def test_a_graph_is_refused_for_the_other_cases() -> None:
    device = open_device("cpu")
    refused = [name for name in DECODERS if build(CASES / name, device, "fp32", 0, Shard(), NoCollective()).graph_problem()]
    assert refused == [name for name in DECODERS if name not in GRAPHED]


@pytest.mark.parametrize("damage", ["zeros", "one_logit", "nan", "swapped"])
def test_the_judge_refuses_wrong_logits(damage: str) -> None:
    """A harness that cannot fail proves nothing."""
    case, setting = load_case(CASES / "gpt2"), Setting()
    want = reference(setting, case)
    got = {name: np.array(want[name]) for name in ("logits", "greedy_logits", "pad_logits", "ppl_nll")}
    sound = Verdict()
    judge(sound, setting, case, got, want)
    assert not sound.faults
    logits = got["logits"]
    if damage == "zeros":
        logits[:] = 0
    elif damage == "one_logit":
        logits[1, 7, 3] += 2 * case["meta"]["rel_tolerance"] * np.abs(logits).max()
    elif damage == "nan":
        logits[0, 0, 0] = np.nan
    else:
        got["pad_logits"] = got["pad_logits"][::-1]
    verdict = Verdict()
    judge(verdict, setting, case, got, want)
    assert verdict.faults
