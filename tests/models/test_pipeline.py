"""A pipeline gives the tokens that one rank gives, whatever the schedule, the micro-batches, and who ends when."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from l1_kernels.device import open_device
from l1_kernels.errors import UserError
from l2_dense_parallel.collectives import NoCollective
from l2_dense_parallel.pipeline.stages import balanced, make_stages
from l2_dense_parallel.slicing import Shard, global_tensors, layer_tensors
from models.build import build_runner
from models.find import find_model
from models.generate import GenerateOptions, generate
from models.loading import open_checkpoint
from models.presets import preset
from models.sampling import Sampling

ROOT = Path(__file__).parents[2]


def prompts(count: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 1024, rng.integers(1, 20)).tolist() for _ in range(count)]


def cases() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for schedule in ("hybrid", "queued", "lockstep"):
        for count in (1, 2, 5, 9):  # one, fewer than four stages, ragged, more than a batch
            found.append({"plan": [schedule], "prompts": prompts(count, count), "new_tokens": 7, "batch_size": 6})
        # Sequences that end early: at tokens that greedy generation comes by.
        found.append({"plan": [schedule], "prompts": prompts(6, 3), "new_tokens": 12, "batch_size": 8, "eos_ids": list(range(0, 1024, 7))})
    found.append({"plan": ["hybrid", 5, 3], "prompts": prompts(7, 8), "new_tokens": 6, "batch_size": 7})
    found.append({"plan": ["hybrid", 1, 4], "prompts": prompts(4, 9), "new_tokens": 6, "batch_size": 4})
    found.append({"plan": ["queued", 3], "prompts": prompts(8, 10), "new_tokens": 6, "batch_size": 8})
    sampling = {"temperature": 0.9, "top_k": 40, "repetition_penalty": 1.3, "seed": 5}
    found.append({"plan": ["hybrid"], "prompts": prompts(5, 11), "new_tokens": 9, "batch_size": 5, "sampling": sampling})
    found.append({"plan": ["lockstep"], "prompts": prompts(3, 12), "new_tokens": 1, "batch_size": 2})
    return found


def alone(some: list[dict[str, Any]], device: str = "cpu") -> list[Any]:
    runner = build_runner(open_checkpoint(find_model("shakespeare")), open_device(device), "fp32", Shard(), NoCollective())
    found = []
    for case in some:
        options = GenerateOptions(
            case["new_tokens"], Sampling(**case.get("sampling", {})), eos_ids=tuple(case.get("eos_ids", ())), batch_size=case["batch_size"]
        )
        found.append([[r.token_ids, r.finish_reason, len(r.token_times)] for r in generate(runner, case["prompts"], options)])
    return found


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("tp", "pp", "kv", "graphs", "direct"),
    [
        *[(1, 2, "gpu", False, False), (1, 4, "cpu", False, False), (2, 2, "gpu", False, False), (1, 2, "gpu", True, False)],
        *[(1, 2, "gpu", True, True), (2, 2, "gpu", False, True), (1, 4, "cpu", False, True)],
    ],
)
def test_the_tokens_are_those_of_one_rank(tp: int, pp: int, kv: str, graphs: bool, direct: bool, tmp_path: Path) -> None:
    """direct: as on GPUs (nccl_pipe.py), over links between hosts."""
    file = tmp_path / "cases.json"
    file.write_text(json.dumps({"tp": tp, "pp": pp, "kv": kv, "graphs": graphs, "direct": direct, "cases": cases()}))
    command = ["mpirun", "-n", str(tp * pp), sys.executable, "-m", "tests.models.pipeline_program", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    got = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    want = alone(cases())
    assert any(reason == "eos" for case in want for _, reason, _ in case) and any(reason == "length" for case in want for _, reason, _ in case)
    assert got["found"] == want
    assert got["bytes"]["send"] > 0 and got["bytes"]["receive"] == 4 * sum(len(tokens) for case in want for tokens, _, _ in case)


@pytest.mark.gpu2
@pytest.mark.parametrize(("kv", "graphs"), [("gpu", True), ("gpu", False), ("cpu", False)])
def test_two_gpus_give_the_tokens_of_one(kv: str, graphs: bool, tmp_path: Path) -> None:
    """Hidden states by NCCL, hosts that run ahead. Micro-batches are other products than whole batches, so where the two best logits are all but equal another may be
    chosen, with all that follows it: 3 of some 100 sequences may differ."""
    file = tmp_path / "cases.json"
    file.write_text(json.dumps({"tp": 1, "pp": 2, "kv": kv, "graphs": graphs, "device": "cuda", "cases": cases()}))
    command = ["mpirun", "-n", "2", sys.executable, "-m", "tests.models.pipeline_program", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))["found"]
    want = alone(cases(), "cuda")
    assert [len(case) for case in found] == [len(case) for case in want]
    pairs = [pair for one, two in zip(found, want, strict=True) for pair in zip(one, two, strict=True)]
    assert sum(got != expected for got, expected in pairs) <= 3


def test_balanced_is_the_least_possible() -> None:
    rng = np.random.default_rng()
    for _ in range(50):
        costs = rng.integers(1, 20, rng.integers(1, 9)).tolist()
        parts = int(rng.integers(1, len(costs) + 1))
        found = balanced(costs, parts)
        assert [i for part in found for i in part] == list(range(len(costs))) and len(found) == parts and all(found)
        assert max(sum(costs[i] for i in part) for part in found) == _least(costs, parts)


def _least(costs: list[int], parts: int) -> int:
    if parts == 1:
        return sum(costs)
    return min(max(sum(costs[:i]), _least(costs[i:], parts - 1)) for i in range(1, len(costs) - parts + 2))


@pytest.mark.parametrize("name", ["gpt2-xl", "gpt-j-6b", "gpt-neox-20b"])
@pytest.mark.parametrize("count", [2, 4])
def test_stages_have_every_tensor_and_much_the_same_bytes(name: str, count: int) -> None:
    config = preset(name)
    stages = make_stages(config, count)
    assert [layer for stage in stages for layer in stage.layers] == list(range(config.num_layers))
    ends = global_tensors(config)
    for tensor in ends:
        holders = [stage.index for stage in stages if stage.holds(tensor, config)]
        tied = tensor == "embed.tokens" and config.tie_embeddings
        assert holders == ([0, count - 1] if tied else [0] if tensor.startswith("embed.") else [count - 1])
    sizes = [
        sum(part.size for layer in stage.layers for part in layer_tensors(config, layer).values())
        + sum(part.size for tensor, part in ends.items() if stage.holds(tensor, config))
        for stage in stages
    ]
    layer = sum(part.size for part in layer_tensors(config, 0).values())
    assert max(sizes) - min(sizes) <= 1.5 * layer


def test_a_stage_needs_a_layer_and_a_decoder() -> None:
    with pytest.raises(UserError, match="--pp 49: the model has 48 layers"):
        make_stages(preset("gpt2-xl"), 49)
    with pytest.raises(UserError, match="--pp 2: an encoder"):
        make_stages(preset("bert-base"), 2)


def strata(ranks: int, *arguments: str) -> str:
    command = ["mpirun", "-n", str(ranks), sys.executable, "-m", "models.gpt", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.mpi
def test_the_commands(tmp_path: Path) -> None:
    texts = [word for prompt in ("KING", "Once upon", "To be") for word in ("--prompt", prompt)]
    common = ["--device", "cpu", "--max-new-tokens", "9", "--json", *texts]
    one, two = (json.loads(strata(ranks, "run", *common, *flags)) for ranks, flags in ((1, []), (2, ["--pp", "2", "--schedule", "queued"])))
    assert two["mesh"]["pp"] == 2 and two["results"] == one["results"]
    found = json.loads(strata(4, "bench", "--device", "cpu", "--pp", "2", "--tp", "2", "--batch", "3", "--prompt-length", "9", "--new-tokens", "4", "--json"))
    assert found["pipeline"]["schedule"] == "hybrid" and found["pipeline"]["prompt_micro_batches"] == 3 and found["pipeline"]["token_micro_batches"] == 2
    assert len(found["pipeline"]["idle"]) == 2 and all(0 <= share < 1 for share in found["pipeline"]["idle"])
    (tmp_path / "text").write_text("To be, or not to be, that is the question.")
    losses = [json.loads(strata(ranks, "score", "--device", "cpu", "--text", str(tmp_path / "text"), "--json", *flags)) for ranks, flags in ((1, []), (2, ["--pp", "2"]))]
    assert losses[0]["mean_nll"] == pytest.approx(losses[1]["mean_nll"], abs=1e-6)


@pytest.mark.mpi
def test_each_rank_says_what_it_holds() -> None:
    command = ["mpirun", "-n", "4", sys.executable, "-m", "models.gpt", "run", "--device", "cpu", "--tp", "2", "--pp", "2", "--prompt", "a", "-n", "1", "--verbose"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "stage 0  layers 0-1   [0 1]" in done.stderr and "stage 1  layers 2-3   [2 3]" in done.stderr
    sizes = [float(size) for size in re.findall(r"([\d.]+) MiB of weights loaded", done.stderr)]
    runner = build_runner(open_checkpoint(find_model("shakespeare")), open_device("cpu"), "fp32", Shard(), NoCollective())
    whole = runner.held_bytes() / 2**20
    assert len(sizes) == 4 and whole / 4 < sum(sizes) / 4 < 0.33 * whole  # norms and positions on every rank, the tied table on both stages
