"""Where keys and values live by --kv auto: the formulas against brute force, and whole runs that have little room."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from subprocess import run

import pytest
from hypothesis import given
from hypothesis import strategies as st

from l1_kernels.device import open_device
from l1_kernels.errors import UserError
from models.kv_home import Need, Speed, bytes_of, fits, in_host_memory, on_device, row_bytes, weigh, worst
from models.presets import preset
from models.speeds import link_speed

H200 = Speed(4.2e12, 55e9)
GPTJ = preset("gpt-j-6b")


def gptj(free: float, context: int = 562) -> Need:
    row, in_buffers = row_bytes(GPTJ, GPTJ.num_layers, GPTJ.num_kv_heads, context, "fp16")
    return Need(int(free), row, in_buffers, 12_100_000_000)


def test_the_paper_s_figure_of_a_sequence() -> None:
    """A GPT-J sequence of 562 tokens is 258 MB, 4.7 ms of a link of 55 GB/s a token."""
    need = gptj(0)
    assert need.row == 2 * 28 * 16 * 562 * 256 * 2
    assert need.row == pytest.approx(258e6, rel=1e-2) and need.row / H200.link == pytest.approx(4.7e-3, rel=1e-2)
    assert need.row_in_buffers * 14 == need.row


def test_host_memory_never_wins_where_one_sequence_fits_on_an_h200() -> None:
    """What the header says: the crossover is at weights * link / bandwidth, here 158 MB and less than one sequence."""
    for sequences in (1, 2, 5, 30):
        home = weigh(64, gptj(sequences * 258e6 + 1e6), H200)
        assert (home.kv, home.rows) == ("gpu", sequences)
    assert weigh(64, gptj(200e6), H200).kv == "cpu"
    short = gptj(20e6, 36)  # sequences of 17 MB: one fits, and host memory gives more
    assert fits(1, short) and weigh(64, short, H200).kv == "cpu"


@given(st.integers(2, 64), st.integers(0, 10**10), st.integers(10**5, 10**9), st.integers(2, 60), st.integers(10**6, 10**11), st.floats(1e9, 1e13), st.floats(1e-3, 1.0))
def test_weigh_takes_the_best(rows: int, free: int, row: int, layers: int, weights: int, bandwidth: float, part: float) -> None:
    need, speed = Need(free, row, max(1, 2 * row // layers), weights), Speed(bandwidth, bandwidth * part)
    if fits(rows, need):
        return
    ways = {("gpu", n): on_device(n, need, speed) for n in range(1, rows + 1) if n * need.row <= free}
    ways |= {("cpu", n): in_host_memory(n, need, speed) for n in range(1, rows + 1) if n * need.row_in_buffers <= free}
    if not ways:
        with pytest.raises(UserError, match="--kv auto: one sequence's"):
            weigh(rows, need, speed)
        return
    home = weigh(rows, need, speed)
    assert home.tokens_per_s == ways[home.kv, home.rows]
    assert home.tokens_per_s >= max(ways.values()) * (1 - 1e-12)


def test_worst() -> None:
    assert worst([Need(3, 4, 2, 9), Need(5, 3, 1, 10)]) == Need(3, 4, 2, 10)


@pytest.mark.parametrize(("text", "size"), [("8GiB", 8 << 30), ("500MB", 500_000_000), ("1.5g", 1_500_000_000), ("64 kib", 1 << 16), ("12", 12)])
def test_sizes(text: str, size: int) -> None:
    assert bytes_of("--gpu-memory", text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "0", "8 bananas", "1e9", "nan", "0.1"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(UserError, match="--gpu-memory"):
        bytes_of("--gpu-memory", text)


def test_the_link_is_measured() -> None:
    assert 1e8 < link_speed(open_device("cpu")) < 1e13


def cli(*arguments: str) -> tuple[int, str, list[str]]:
    ended = run([sys.executable, "-m", "models.gpt", *arguments], capture_output=True, text=True, timeout=300)
    return ended.returncode, ended.stdout, ended.stderr.strip().split("\n")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"What say you of number {n}, my lord"}) + "\n" for n in range(5)))
    return path


def test_little_room_gives_the_same_texts(prompts: Path) -> None:
    """14.6 MiB, 13.3 of them weights: not all five caches fit."""
    asked = ("run", "--device", "cpu", "--prompts", str(prompts), "--max-new-tokens", "40", "--ignore-eos", "--json")
    status, plenty, said = cli(*asked)
    assert status == 0 and "side by side" not in "".join(said)
    status, little, said = cli(*asked, "--gpu-memory", "16MiB")
    assert status == 0, said
    assert any("of 5 sequences side by side" in line for line in said), said
    assert [one["token_ids"] for one in json.loads(little)["results"]] == [one["token_ids"] for one in json.loads(plenty)["results"]]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--gpu-memory", "1MiB"), "--gpu-memory 1 MiB: the weights alone are 13.3"),
        (("--gpu-memory", "13.35MiB"), "--kv auto: one sequence's keys and values"),
        (("--gpu-memory", "13.35MiB", "--kv", "gpu"), "--kv gpu: the keys and values of 5 sequences"),
        (("--gpu-memory", "much"), "--gpu-memory much: give a size"),
        (("--kv", "disk"), "--kv disk: have auto, gpu, cpu"),
    ],
)
def test_no_room_is_one_line(prompts: Path, flags: tuple[str, ...], message: str) -> None:
    status, out, said = cli("run", "--device", "cpu", "--prompts", str(prompts), "--max-new-tokens", "40", *flags)
    assert status == 2
    errors = [line for line in said if line.startswith("error: ")]
    assert len(errors) == 1 and message in errors[0], said
