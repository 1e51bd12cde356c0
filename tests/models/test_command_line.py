"""The commands in this process: what they print, what they refuse and with which line; a few as processes of their own."""

import io
import json
import math
import os
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest

from l1_kernels.errors import UserError
from l2_dense_parallel.ranks import Launch
from l2_dense_parallel.world import World
from models.gpt import command_line, requested_device

TESTS = Path(__file__).parents[1]
CASE = str(TESTS / "conformance" / "llama_gqa")
SHAKESPEARE = json.loads((TESTS / "golden" / "shakespeare" / "golden.json").read_text(encoding="utf-8"))


def strata(*arguments: str) -> tuple[str, str]:
    """(standard output, standard error) of a command on the CPU, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        assert command_line(World(Launch()), [*arguments, "--device", "cpu"]) == 0
    return out.getvalue(), err.getvalue()


def process(*arguments: str, timeout: int = 120) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "models.gpt", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environ, cwd=TESTS.parent)


# ---------------------------------------------------------------------------------------------- run


def test_run_json_is_one_document_and_the_golden_text():
    prompt = SHAKESPEARE["prompts"][1]
    out, err = strata("run", "--json", "--prompt", prompt["prompt"], "--max-new-tokens", "64")
    found = json.loads(out)
    assert set(found) == {"model", "device", "dtype", "mesh", "results", "timing"}
    assert (found["model"], found["device"], found["dtype"]) == ("shakespeare", "cpu", "fp32")
    assert found["mesh"] == {"tp": 1, "pp": 1, "dp": 1, "ep": 1, "es": 1}
    (result,) = found["results"]
    assert set(result) == {"prompt", "prompt_ids", "token_ids", "text", "finish_reason"}
    assert result["prompt_ids"] == prompt["ids"] and result["token_ids"] == prompt["greedy_ids"]
    assert result["prompt"] + result["text"] == prompt["text"] and result["finish_reason"] == "length"
    assert set(found["timing"]) == {"load_s", "first_token_ms", "token_ms", "tokens_per_s"} and all(v > 0 for v in found["timing"].values())
    assert err.startswith("shakespeare on cpu")


def test_run_streams_after_its_prompt_and_ends_with_the_times():
    prompt = SHAKESPEARE["prompts"][1]
    out, _ = strata("run", "--prompt", prompt["prompt"], "-n", "64")
    first, *text, blank, last = out.splitlines()
    assert first.startswith("shakespeare on cpu (") and "\n".join(text) == prompt["text"] and blank == ""
    assert last.startswith("64 tokens: time to first token ") and "ms/token" in last and last.endswith("tokens/s")
    assert strata("run", "--prompt", prompt["prompt"], "-n", "64", "--no-stream")[0].splitlines()[:-1] == out.splitlines()[:-1]


def test_run_without_arguments_says_something():
    out, _ = strata("run", "-n", "5")
    assert "KING RICHARD:\nWhat, is the" in out


def test_run_prompts_of_a_file_equal_each_alone(tmp_path):
    texts = ["ROMEO:\nO, ", "To be", "What, é 你", "KING RICHARD:\n"]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\ufeff" + "\n\n".join(json.dumps({"prompt": t, "id": 7}) for t in texts) + "\n", encoding="utf-8")
    options = ("--json", "-n", "12", "--temperature", "0.9", "--top-k", "40", "--top-p", "0.95", "--seed", "3", "--repetition-penalty", "1.1")
    together = json.loads(strata("run", "--prompts", str(file), *options)[0])["results"]
    in_twos = json.loads(strata("run", *(x for t in texts for x in ("--prompt", t)), "--batch-size", "2", *options)[0])["results"]
    assert [r["prompt"] for r in together] == texts and together == in_twos
    alone = json.loads(strata("run", "--prompt", texts[0], *options)[0])["results"]
    assert alone[0] == together[0]  # the first prompt of any command has number 0
    assert len({tuple(r["token_ids"]) for r in together}) > 1


def test_run_ids_without_a_tokenizer(tmp_path):
    file = tmp_path / "ids.jsonl"
    golden = np.load(Path(CASE) / "golden.npz")
    prompts = [row[mask > 0].tolist() for row, mask in zip(golden["pad_input_ids"], golden["pad_attention_mask"], strict=True)]
    file.write_text("\n".join(map(json.dumps, prompts)))
    results = json.loads(strata("run", "--model", CASE, "--ids", str(file), "-n", "8", "--json")[0])["results"]
    assert [r["token_ids"] for r in results] == golden["pad_tokens"].tolist()
    assert [(r["prompt"], r["text"]) for r in results] == [(None, "")] * 2
    out, _ = strata("run", "--model", CASE, "--ids", str(file), "-n", "8")
    assert json.dumps(golden["pad_tokens"][1].tolist()) in out


def test_stop_texts_and_ids():
    ask = ("run", "--json", "--prompt", SHAKESPEARE["prompts"][1]["prompt"], "-n", "64")  # What, is the news?\n\nQUEEN ELIZABETH
    result = json.loads(strata(*ask, "--stop", "EEN", "--stop", "no such")[0])["results"][0]
    assert (result["text"], result["finish_reason"]) == ("What, is the news?\n\nQU", "stop")
    comma = SHAKESPEARE["prompts"][1]["greedy_ids"][1]
    result = json.loads(strata(*ask, "--stop-id", str(comma))[0])["results"][0]
    assert (result["text"], result["finish_reason"], result["token_ids"][-1]) == ("What", "stop", comma)


def test_new_tokens_not_given_are_what_fits():
    long = "the " * 200
    result = json.loads(strata("run", "--json", "--prompt", long)[0])["results"][0]
    assert len(result["prompt_ids"]) + len(result["token_ids"]) == 256 and len(result["token_ids"]) < 128


# ---------------------------------------------------------------------------------------------- score and bench


def test_score_of_ids_and_its_logits(tmp_path):
    golden = np.load(Path(CASE) / "golden.npz")
    (tmp_path / "ppl.jsonl").write_text(json.dumps(golden["ppl_input_ids"].tolist()))
    found = json.loads(strata("score", "--model", CASE, "--ids", str(tmp_path / "ppl.jsonl"), "--json")[0])
    assert set(found) == {"tokens", "mean_nll", "perplexity"} and found["tokens"] == 39
    assert found["mean_nll"] == pytest.approx(float(golden["ppl_nll"]), abs=1e-4) and found["perplexity"] == pytest.approx(math.exp(found["mean_nll"]))
    (tmp_path / "two.jsonl").write_text("\n".join(json.dumps(row.tolist()) for row in golden["input_ids"]))
    out = tmp_path / "logits.npz"
    strata("score", "--model", CASE, "--ids", str(tmp_path / "two.jsonl"), "--json", "--dump-logits", str(out))
    logits = np.load(out)
    assert sorted(logits) == ["logits_0", "logits_1"] and logits["logits_0"].dtype == np.float32
    for i in range(2):
        assert np.abs(logits[f"logits_{i}"] - golden["logits"][i]).max() < 1e-4 * np.abs(golden["logits"]).max()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["logits.npz", "ppl.jsonl", "two.jsonl"]


@pytest.mark.parametrize("scheme", ["w8a16", "w8a8"])
def test_int8_keeps_outliers(tmp_path, scheme):
    """As OPT has them: within 1 % of the golden NLL, from which one int8 scale for all of a token is 12 % away."""
    case = TESTS / "conformance" / "gpt2_outliers"
    golden = np.load(case / "golden.npz")
    (tmp_path / "ids.jsonl").write_text(json.dumps(golden["ppl_input_ids"].tolist()))
    out, err = strata("score", "--model", str(case), "--ids", str(tmp_path / "ids.jsonl"), "--dtype", "int8", "--int8", scheme, "--json")
    assert f", int8 ({scheme})" in err
    change = json.loads(out)["mean_nll"] / float(golden["ppl_nll"]) - 1
    assert 0 < abs(change) < 0.01


def test_int8_rounds_weights_alone_unless_told_to_round_activations(tmp_path):
    (tmp_path / "ids.jsonl").write_text(json.dumps(list(range(1, 60))))
    scores = {}
    for scheme in ((), ("--int8", "w8a16"), ("--int8", "w8a8")):
        arguments = ("score", "--ids", str(tmp_path / "ids.jsonl"), "--dtype", "int8", *scheme, "--json")
        scores[scheme[1:]] = json.loads(strata(*arguments)[0])["mean_nll"]
    assert scores[()] == scores["w8a16",] != scores["w8a8",]


def test_a_repetition_penalty_counts_what_was_generated():
    """A penalty this large leaves no token that was there before, in the prompt or since."""
    out, _ = strata("run", "--json", "-n", "40", "--ignore-eos", "--repetition-penalty", "1e9")
    (result,) = json.loads(out)["results"]
    seen = result["prompt_ids"] + result["token_ids"]
    assert len(set(result["token_ids"])) == 40 and len(set(seen)) == len(set(result["prompt_ids"])) + 40


def test_dumped_logits_of_a_long_text_are_in_its_order(tmp_path):
    ids, dump = tmp_path / "ids.jsonl", tmp_path / "out.npz"
    tokens = [int(token) for token in np.random.default_rng(5).integers(0, 1024, 600)]  # three windows of 256
    ids.write_text("".join(json.dumps(part) + "\n" for part in (tokens, tokens[:256], tokens[256:512], tokens[512:])))
    strata("score", "--ids", str(ids), "--dump-logits", str(dump))
    found = np.load(dump)
    np.testing.assert_array_equal(found["logits_0"], np.concatenate([found[f"logits_{i}"] for i in (1, 2, 3)]))


def test_dumped_logits_go_where_a_link_points(tmp_path):
    ids, there, link = tmp_path / "ids.jsonl", tmp_path / "there.npz", tmp_path / "link.npz"
    ids.write_text("[1, 2, 3]\n")
    link.symlink_to(there)
    strata("score", "--ids", str(ids), "--dump-logits", str(link))
    assert link.is_symlink() and np.load(there)["logits_0"].shape == (3, 1024)


def test_a_score_that_is_no_number_is_refused(tmp_path):
    from safetensors.numpy import load_file, save_file

    model, ids, dump = tmp_path / "model", tmp_path / "ids.jsonl", tmp_path / "out.npz"
    shutil.copytree(CASE, model)
    ids.write_text("[1, 2, 3]\n")
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"][0] = np.nan
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(UserError, match="the logits of text 0 became NaN in its tokens from 0"):
        strata("score", "--json", "--model", str(model), "--ids", str(ids), "--dump-logits", str(dump))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ids.jsonl", "model"]
    with pytest.raises(UserError, match=r"--check-nan: logits of prompt 1 are not all finite at new token 1, first in the head"):
        strata("bench", "--model", str(model), "--prompt-length", "3", "--new-tokens", "2", "--check-nan")


def test_score_of_text_is_cut_into_windows(tmp_path):
    text = (TESTS.parent / "models/bundled/shakespeare/validation.txt").read_text(encoding="utf-8")[:3000]
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    found = json.loads(strata("score", "--text", str(tmp_path / "text.txt"), "--json")[0])
    from models.tokenizer import load_tokenizer

    ids = load_tokenizer(TESTS.parent / "models/bundled/shakespeare").encode(text)
    assert len(ids) > 2 * 256 and found["tokens"] == len(ids) - 1
    # The same text, a window a line: only the predictions across the cuts are missing.
    (tmp_path / "cut.jsonl").write_text("\n".join(json.dumps(ids[i : i + 256]) for i in range(0, len(ids), 256)))
    cut = json.loads(strata("score", "--ids", str(tmp_path / "cut.jsonl"), "--json")[0])
    assert cut["tokens"] == found["tokens"] - (len(ids) - 1) // 256
    assert 0.5 < found["mean_nll"] * found["tokens"] - cut["mean_nll"] * cut["tokens"] < 30 * 3


def test_bench_counts_the_bytes_it_divides_by(monkeypatch):
    from models import speeds

    monkeypatch.setattr(speeds, "SUM_BYTES", 1 << 22)
    found = json.loads(strata("bench", "--prompt-length", "7", "--new-tokens", "5", "--json")[0])
    hidden, layers, vocab = 256, 4, 1024
    assert found["weight_bytes"] == 4 * (layers * 12 * hidden * hidden + vocab * hidden)
    assert found["gb_s"] == pytest.approx(found["weight_bytes"] / found["token_ms"] / 1e6, rel=0.01)
    assert found["percent_of_bound"] == pytest.approx(100 * found["bound_ms"] / found["token_ms"], rel=0.05)
    assert "ms/token" in strata("bench", "--prompt-length", "7", "--new-tokens", "5", "--batch", "3")[0]


def test_bench_of_experts_counts_those_that_are_chosen(monkeypatch):
    from models import speeds

    monkeypatch.setattr(speeds, "SUM_BYTES", 1 << 22)
    sizes = [
        json.loads(strata("bench", "--model", "shakespeare_moe", "--prompt-length", "3", "--new-tokens", "3", "--batch", str(batch), "--json")[0])
        for batch in (1, 2)
    ]
    one_expert = 2 * 2 * 192 * 384 * 4  # two layers, up and down
    assert sizes[1]["weight_bytes"] - sizes[0]["weight_bytes"] == pytest.approx((8 * (1 - (7 / 8) ** 2) - 1) * one_expert, abs=2)


def test_env_tells_where_models_is():
    out, _ = io.StringIO(), None
    with redirect_stdout(out):
        assert command_line(World(Launch()), ["env"]) == 0
    facts = {line.split(":")[0]: line for line in out.getvalue().splitlines() if not line.startswith(" ")}
    assert str(TESTS.parent / "models") in facts["models"]
    assert {"python", "packages", "cpu", "threads", "limits", "gpu", "nccl", "mpi"} <= set(facts)


# ---------------------------------------------------------------------------------------------- what is refused


@pytest.fixture
def files(tmp_path):
    (tmp_path / "bad_json.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    (tmp_path / "bad_utf8.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    (tmp_path / "no_prompt.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "empty_prompt.jsonl").write_text('{"prompt": "a"}\n{"prompt": ""}\n')
    (tmp_path / "outside.jsonl").write_text("[1, 2]\n[5, 1024]\n")
    (tmp_path / "not_ids.jsonl").write_text('[1, "2"]\n')
    (tmp_path / "no_ids.jsonl").write_text("[]\n")
    (tmp_path / "long.jsonl").write_text(json.dumps([1] * 257) + "\n")
    (tmp_path / "full.jsonl").write_text(json.dumps([1] * 256) + "\n")
    (tmp_path / "one.jsonl").write_text("[1]\n")
    (tmp_path / "bad.txt").write_bytes(b"good\ngood\n\xc3(")
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("run --prompts bad_json.jsonl", "bad_json.jsonl line 2: not valid JSON"),
        ("run --prompts bad_utf8.jsonl", "bad_utf8.jsonl line 2: not valid UTF-8"),
        ("run --prompts no_prompt.jsonl", "no_prompt.jsonl line 1: expected"),
        ("run --prompts empty.jsonl", "holds no prompt"),
        ("run --prompts missing.jsonl", "missing.jsonl: cannot be read"),
        ("run --prompts empty_prompt.jsonl", "empty_prompt.jsonl line 2: is empty"),
        ("run --prompt=", "--prompt: is empty"),
        ("run --ids outside.jsonl", "outside.jsonl line 2: token id 1024 is outside the vocabulary of 1024"),
        ("run --ids not_ids.jsonl", "not_ids.jsonl line 1: expected a list of token ids"),
        ("run --ids no_ids.jsonl", "no_ids.jsonl line 1: is empty"),
        ("run --ids long.jsonl", "257 tokens are more than the model's 256 positions"),
        ("run --ids full.jsonl", "fill the model's 256 positions"),
        ("run --prompt a --max-new-tokens 256", "--max-new-tokens can be 255 at most"),
        ("run --prompt a --ids one.jsonl", "--prompt and --ids: give one of them only"),
        ("run --ids one.jsonl --chat", "--chat: needs text"),
        ("run --prompt a --chat", "no chat template"),
        ("run --max-new-tokens 0", "--max-new-tokens must be at least 1"),
        ("run --temperature -1", "--temperature must be"),
        ("run --temperature nan", "--temperature must be"),
        ("run --top-p 0", "--top-p must be"),
        ("run --top-k -1", "--top-k must be"),
        ("run --batch-size 0", "--batch-size must be at least 1"),
        ("run --stop=", "--stop: an empty text"),
        ("run --stop-id 1024", "--stop-id 1024 is outside"),
        ("run --model no-such-model", "--model no-such-model"),
        ("run --dtype fp8", "--dtype fp8: have fp32, fp16, bf16, int8"),
        (f"run --model {CASE} --prompt a", "no tokenizer; give token ids with --ids"),
        (f"run --model {CASE}", "no tokenizer: give token ids with --ids"),
        (f"run --model {TESTS}/conformance/bert", "is an encoder"),
        ("run --tp 3", "--tp 3"),
        ("run --weights nvme", "--weights nvme: streaming is not there yet"),
        ("run --pp 2", "--pp 2 does not divide the 1 ranks"),
        ("run --ep 2", "--ep 2: "),
        ("run --schedule hybrid", "--schedule hybrid: is a pipeline's; add --pp P"),
        ("run --token-micro-batches 2", "--token-micro-batches 2: is a pipeline's"),
        ("run --pp 2 --schedule queued --prompt-micro-batches 4 --token-micro-batches 2", "--schedule queued: has the same micro-batches"),
        ("run --pp 2 --schedule round", "--schedule round: have hybrid, queued, lockstep"),
        ("run --gpu-memory lots", "--gpu-memory lots: give a size"),
        ("run --prefetch 2", "--prefetch 2: "),
        ("run --int8 w8a8", "--int8 w8a8: says how --dtype int8 rounds; add --dtype int8"),
        ("run --int8 w8a16 --dtype fp16", "--int8 w8a16: says how --dtype int8 rounds; add --dtype int8"),
        ("run --int8 w4a8 --dtype int8", "--int8 w4a8: have w8a16, w8a8"),
        ("run --all-to-all pcc", "--all-to-all pcc: "),
        ("run --fusion", "--fusion: fused kernels are a GPU's"),
        ("run --overlap --device cpu", "--overlap: launches overlap on a GPU alone"),
        ("run --all-reduce ring", "--all-reduce ring: have auto, nccl, one-shot"),
        ("run --share-gpu --device cpu", "--share-gpu: this run takes no GPU"),
        ("run --all-reduce one-shot --device cpu", "--all-reduce one-shot: is for ranks with a GPU each"),
        ("run --offload-parity", "--offload-parity: says which layers' keys and values move; add --kv cpu"),
        ("score", "give one of --text FILE and --ids"),
        ("score --text bad.txt --ids one.jsonl", "give one of"),
        ("score --text bad.txt", "bad.txt line 3: not valid UTF-8"),
        ("score --ids one.jsonl", "one token predicts nothing"),
        ("score --ids outside.jsonl", "token id 1024 is outside"),
        ("score --ids full.jsonl --dump-logits no/such/folder.npz", "--dump-logits no/such/folder.npz: cannot be written"),
        ("score --ids full.jsonl --dump-logits .", "is a folder"),
        ("score --ids full.jsonl --dump-logits=", "is a folder"),
        ("score --ids full.jsonl --dump-logits pipe", "--dump-logits pipe: is no regular file"),
        ("score --ids full.jsonl --dump-logits /dev/null", "--dump-logits /dev/null: is no regular file"),
        ("score --ids full.jsonl --pp 2 --schedule queued", "--schedule queued: a score's passes go through the stages one by one"),
        ("score --ids full.jsonl --pp 2 --token-micro-batches 2", "--token-micro-batches 2: a score's passes"),
        ("score --ids full.jsonl --graph", "--graph: replays steps that generate"),
        ("run --ids=", "--ids : cannot be read"),
        ("run --prompts=", "--prompts : cannot be read"),
        ("score --ids=", "--ids : cannot be read"),
        ("bench --prompt-length 0", "--prompt-length must be at least 1"),
        ("bench --new-tokens 1", "--new-tokens must be at least 2, got 1"),
        ("bench --prompt-length 300", "--prompt-length: 300 tokens are more than"),
    ],
)
def test_wrong_input_is_one_line_that_names_it(files, monkeypatch, arguments, message):
    monkeypatch.chdir(files)
    before = sorted(p.name for p in files.iterdir())
    with pytest.raises(UserError) as caught:
        strata(*arguments.split())
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert sorted(p.name for p in files.iterdir()) == before


@pytest.mark.parametrize(("flags", "fused"), [([], None), (["--no-fusion"], False), (["--fusion"], True), (["--no-overlap"], None)])
def test_fusion_reaches_the_device(monkeypatch, flags, fused):
    from models.cli import open_model

    def opened(name, index=0, fused=None, gemm="sbi", overlap=True):
        raise UserError(f"{name} {fused} {gemm} {overlap}")

    monkeypatch.setattr(open_model, "open_device", opened)
    monkeypatch.setattr(open_model, "choose_device", lambda world, engine: ("cuda", 0, [0], ""))
    with pytest.raises(UserError, match=f"^cuda {fused} sbi {'--no-overlap' not in flags}$"):
        strata("run", "--prompt", "a", *flags)


def test_device_is_known_before_parsing():
    assert requested_device(["run", "--device", "sim"]) == requested_device(["--device=sim"]) == "sim"
    assert requested_device([]) == requested_device(["run"]) == "auto" and requested_device(["run", "--device"]) == ""


# ---------------------------------------------------------------------------------------------- as a process


def test_statuses_of_the_process():
    done = process("run", "--prompt", "a", "--top-p", "7")
    assert done.returncode == 2 and done.stdout == "" and done.stderr == "error: --top-p must be above 0 and at most 1, got 7.0\n"
    done = process("run", "--no-such-flag")
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_a_reader_that_leaves_and_a_disk_that_is_full():
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "models.gpt", "run", "-n", "2"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=TESTS.parent, timeout=120)
    assert done.returncode == 2 and done.stderr.startswith("error: standard output cannot be written")
    done = subprocess.run(f"{sys.executable} -m models.gpt run | head -n 1; exit ${{PIPESTATUS[0]}}", shell=True, executable="/bin/bash",
                          capture_output=True, text=True, cwd=TESTS.parent, timeout=120)  # fmt: skip
    assert done.returncode == 141 and done.stderr == "" and done.stdout.count("\n") == 1


def test_streams_that_are_closed():
    def ended(redirection: str) -> subprocess.CompletedProcess[str]:
        command = f"{sys.executable} -m models.gpt run -n 2 {redirection}"
        return subprocess.run(command, shell=True, capture_output=True, text=True, cwd=TESTS.parent, timeout=120)

    done = ended(">&-")
    assert done.returncode == 2 and done.stderr == "error: standard output is closed; leave it open, or send it to /dev/null\n"
    done = ended("2>&-")
    assert done.returncode == 0 and "KING RICHARD:\nWhat," in done.stdout


def test_json_stays_json_where_the_output_is_not_utf8():
    command = [sys.executable, "-m", "models.gpt", "run", "--json", "-n", "1", "--prompt", "é 你"]
    environ = os.environ | {"PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(command, capture_output=True, timeout=120, env=environ, cwd=TESTS.parent)
    assert done.returncode == 0 and json.loads(done.stdout.decode("ascii"))["results"][0]["prompt"] == "é 你"


def test_only_the_text_is_json_on_standard_output():
    done = process("run", "--json", "-n", "3")
    assert done.returncode == 0 and done.stdout.count("\n") == 1 and len(json.loads(done.stdout)["results"][0]["token_ids"]) == 3


def test_first_token_comes_soon():
    """Under 3 s with a warm cache on an idle machine (the design's number); processor time, so that a busy one passes too."""
    process("run", "-n", "1")
    code = (
        "import resource, runpy, sys, atexit; sys.argv = ['gpt', 'run', '-n', '1', '--device', 'cpu'];"
        "atexit.register(lambda: print(resource.getrusage(resource.RUSAGE_SELF).ru_utime, file=sys.stderr));"
        "runpy.run_module('models.gpt', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=TESTS.parent
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stderr.split()[-1]) < 3.0


def test_cpu_path_imports_neither_gpu_nor_mpi_nor_formats_it_does_not_read():
    code = (
        "import sys; from models.gpt import command_line; from l2_dense_parallel.world import World; from l2_dense_parallel.ranks import Launch\n"
        "command_line(World(Launch()), ['run', '-n', '2', '--device', 'cpu'])\n"
        "print('IMPORTED', [m for m in ('cupy', 'numba.cuda', 'numba_cuda', 'mpi4py', 'gguf', 'h5py', 'jinja2') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=TESTS.parent)
    assert done.stdout.splitlines()[-1] == "IMPORTED []", done.stdout + done.stderr
