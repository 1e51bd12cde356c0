"""Encoders by graphs: the same hidden states whatever shares the pass, one recording a bucket, and a way on where none can be made.

On the CPU a replay calls the pass; `-m gpu` runs the same on CUDA graphs, `-m sim` on the GPU's kernels without a GPU.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from l1_kernels.device import open_device
from l2_dense_parallel.collectives import NoCollective
from l2_dense_parallel.ranks import read_launch
from l2_dense_parallel.slicing import Shard
from l2_dense_parallel.world import World
from layers.batch import Batch
from models.cli.app import application
from models.encode import embed, fill_masks
from models.encode_graph import LEAST, EncodeGraphs, bucket
from tests.equivalence.run import build as cut
from tests.models.encode_graph_checks import CASES, build, check_passes, poisoned, some_texts

BARS = {"fp32": 1e-5, "fp16": 2e-3}
PASSES = [(5, 1, 12), (1,), (7, 7), (16,), (3, 14, 9), (2,)]  # buckets 24, 16 (five times over, with 15, 2, 0, 14 idle), 32


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return open_device(request.param)


def test_buckets_hold_their_tokens_and_waste_little():
    sizes = [bucket(n) for n in range(1, 2000)]
    assert all(n <= size <= max(LEAST, 1.5 * n) for n, size in enumerate(sizes, start=1))
    assert bucket(128) == 128 and bucket(129) == 192 and bucket(193) == 256 and bucket(16) == 16 and bucket(17) == 24
    assert len(set(sizes)) == 15


@pytest.mark.parametrize("case", ["bert", "distilbert", "roberta"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_the_same_as_without(device, case, dtype):
    graphs = check_passes(build(device, case, dtype), PASSES, BARS[dtype])
    assert sorted(graphs._graphs) == [16, 24, 32] and graphs.recording_s > 0


@pytest.mark.sim
def test_the_same_on_the_simulator(monkeypatch):
    """One layer, and a bucket of 4 with an idle token, for the simulator is slow."""
    monkeypatch.setattr("models.encode_graph.LEAST", 4)
    runner = cut(CASES / "distilbert", open_device("sim"), "fp16", 1, Shard(), NoCollective())
    batch, graphs = Batch.encode(some_texts((2, 1))), poisoned(EncodeGraphs(runner, 2, 2))
    want = np.array(runner.hidden(batch, runner.new_cache(2, 2)))
    np.testing.assert_allclose(graphs.hidden(batch), want, atol=BARS["fp16"] * np.abs(want).max())


@pytest.mark.gpu
def test_a_pass_is_one_launch():
    runner = build(open_device("cuda"), "bert", "fp16")
    graphs = EncodeGraphs(runner, 2, 16)
    batch = Batch.encode(some_texts((9, 7)))
    graphs.hidden(batch)
    before = runner.device.launches()
    graphs.hidden(batch)
    assert runner.device.launches() - before == 1


def test_embeddings_and_masks(device):
    runner, texts = build(device, "distilbert"), some_texts((1, 7, 3, 12, 5))
    texts[3][4] = texts[1][0] = 99
    plain, masks = embed(runner, texts, 2), fill_masks(runner, texts, 99, 3, 2)
    graphs = EncodeGraphs(runner, 2, 12)
    np.testing.assert_allclose(embed(runner, texts, 2, passes=graphs), plain, atol=1e-5)
    got = fill_masks(runner, texts, 99, 3, 2, graphs)
    assert [[(m.position, [i for i, _ in m.tokens]) for m in text] for text in got] == [[(m.position, [i for i, _ in m.tokens]) for m in text] for text in masks]


def test_a_pass_that_cannot_be_recorded_runs_without(device, capsys, monkeypatch):
    def refuse(step):
        raise RuntimeError("no capture today\nand more")

    runner, texts = build(device, "bert"), some_texts((4, 6, 2))
    plain = embed(runner, texts, 2)
    monkeypatch.setattr(runner.device, "capture", refuse)
    graphs = EncodeGraphs(runner, 2, 6)
    np.testing.assert_allclose(embed(runner, texts, 2, passes=graphs), plain, atol=1e-6)
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("warning: ") and "no capture today" in error and graphs.failure


@pytest.mark.parametrize(("texts", "message"), [([[5], [6], [7]], "text 2 of a pass of 2"), ([[5] * 9], "position 8 in a context of 8"), ([[100000]], "vocabulary")])
def test_wrong_batches_do_not_reach_the_device(texts, message):
    graphs = EncodeGraphs(build(open_device("cpu"), "bert"), 2, 8)
    with pytest.raises(ValueError, match=message):
        graphs.hidden(Batch.encode(texts))


def test_the_commands_flag(tmp_path, capsys):
    path = tmp_path / "ids.jsonl"
    path.write_text("[5, 6, 7, 8, 9]\n[7, 7]\n[30, 31, 7]\n")

    def command(name, *flags):
        arguments = [name, "--model", str(CASES / "bert"), "--ids", str(path), "--device", "cpu", "--json", "--verbose", *flags]
        application(World(read_launch()), "strata-bert")(args=arguments, standalone_mode=False)()
        out, err = capsys.readouterr()
        return json.loads(out), "each pass is one replay of a graph" in err

    (plain, told), (graphed, graph_told) = command("embed"), command("embed", "--graph")
    assert (told, graph_told) == (False, True)
    np.testing.assert_allclose(graphed["embeddings"], plain["embeddings"], atol=1e-6)
    (plain, _), (graphed, graph_told) = command("fill-mask", "--mask-id", "7"), command("fill-mask", "--mask-id", "7", "--graph")
    assert graph_told and [len(entry["masks"]) for entry in graphed["results"]] == [1, 2, 1]
    for a, b in zip(plain["results"], graphed["results"], strict=True):
        assert [m["position"] for m in a["masks"]] == [m["position"] for m in b["masks"]]
        assert [t["id"] for m in a["masks"] for t in m["tokens"]] == [t["id"] for m in b["masks"] for t in m["tokens"]]
