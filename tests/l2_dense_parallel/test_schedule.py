"""Schedules as data; and docs/layer2.md, whose charts are what its commands print."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from l2_dense_parallel.pipeline.draw import main
from l2_dense_parallel.pipeline.schedule import NAMES, Schedule, Work, divided, make_schedule
from l2_dense_parallel.pipeline.simulate import Times, simulate

PAGE = (Path(__file__).parents[2] / "docs" / "layer2.md").read_text(encoding="utf-8")
COUNTS = st.none() | st.integers(1, 20)


def any_schedule(name: str, stages: int, sequences: int, prompts: int | None, tokens: int | None) -> Schedule:
    return make_schedule(name, stages, sequences, prompts, tokens if name == "hybrid" else prompts)


@given(st.sampled_from(NAMES), st.integers(1, 9), st.integers(1, 40), COUNTS, COUNTS, st.integers(1, 4))
def test_every_sequence_once_a_pass(name: str, stages: int, sequences: int, prompts: int | None, tokens: int | None, passes: int) -> None:
    schedule = any_schedule(name, stages, sequences, prompts, tokens)
    order = list(schedule.works(passes))
    assert len(set(order)) == len(order) and [work.number for work in order] == sorted(work.number for work in order)
    for number in range(passes):
        assert [i for work in order if work.number == number for i in schedule.sequences(work)] == list(range(sequences))
        assert all(len(schedule.sequences(work)) for work in order)


@given(st.sampled_from(NAMES), st.integers(1, 9), st.integers(1, 40), COUNTS, COUNTS, st.integers(1, 4))
def test_tokens_come_from_those_who_make_them(
    name: str, stages: int, sequences: int, prompts: int | None, tokens: int | None, passes: int
) -> None:
    """A work waits for the works of the pass before that share a sequence with it, or in lockstep for all of them, and for no other."""
    schedule = any_schedule(name, stages, sequences, prompts, tokens)
    order = list(schedule.works(passes))
    for work in order:
        mine = set(schedule.sequences(work))
        before = [w for w in order if w.number == work.number - 1]
        wanted = [w for w in before if name == "lockstep" or mine & set(schedule.sequences(w))]
        assert list(schedule.tokens_from(work)) == wanted


@given(st.sampled_from(NAMES), st.integers(1, 9), st.integers(1, 40), COUNTS, COUNTS, st.integers(1, 5))
def test_no_schedule_waits_for_ever(name: str, stages: int, sequences: int, prompts: int | None, tokens: int | None, passes: int) -> None:
    schedule = any_schedule(name, stages, sequences, prompts, tokens)
    trace = simulate(schedule, passes, Times(1, 1, 1, 1, 1, 1))
    assert len(trace.bars) == stages * len(list(schedule.works(passes)))


@given(st.integers(1, 200), st.integers(1, 50))
def test_micro_batches_differ_by_one_at_most_and_the_last_are_the_smaller(count: int, parts: int) -> None:
    sizes = [len(part) for part in divided(count, parts)]
    assert len(sizes) == min(count, parts) and sum(sizes) == count
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


def test_what_the_names_mean() -> None:
    hybrid = make_schedule("hybrid", 2, 5)
    assert hybrid.prompt_parts == (range(0, 2), range(2, 3), range(3, 4), range(4, 5)) and hybrid.token_parts == (range(0, 3), range(3, 5))
    assert hybrid.tokens_from(Work(0, 1)) == ()
    assert hybrid.tokens_from(Work(1, 0)) == (Work(0, 0), Work(0, 1)) and hybrid.tokens_from(Work(1, 1)) == (Work(0, 2), Work(0, 3))
    assert hybrid.tokens_from(Work(2, 1)) == (Work(1, 1),)
    queued, lockstep = (make_schedule(name, 3, 7) for name in ("queued", "lockstep"))
    assert queued.prompt_parts == queued.token_parts == (range(0, 3), range(3, 5), range(5, 7)) == lockstep.token_parts
    assert queued.tokens_from(Work(1, 1)) == (Work(0, 1),) and not queued.drains
    assert lockstep.tokens_from(Work(1, 1)) == (Work(0, 0), Work(0, 1), Work(0, 2)) and lockstep.drains
    assert make_schedule("queued", 3, 7, token_micro_batches=2).prompt_parts == (range(0, 4), range(4, 7))


@pytest.mark.parametrize("name", NAMES)
def test_fewer_sequences_than_stages_and_one(name: str) -> None:
    assert make_schedule(name, 8, 3).token_parts == (range(0, 1), range(1, 2), range(2, 3))
    alone = make_schedule(name, 8, 1)
    assert alone.prompt_parts == alone.token_parts == (range(0, 1),)
    assert simulate(alone, 3, Times(1, 0, 1)).total == 3 * 8  # one stage at a time


@pytest.mark.parametrize(
    "name, stages, sequences, prompts, tokens",
    [
        ("greedy", 2, 4, None, None),
        ("hybrid", 0, 4, 2, 2),
        ("hybrid", 2, 0, None, None),
        ("hybrid", 2, 4, 0, None),
        ("hybrid", 2, 4, None, 0),
        ("queued", 2, 4, 0, None),
        ("queued", 2, 4, 2, 3),
        ("lockstep", 2, 4, 3, 2),
    ],
)
def test_what_is_refused(name: str, stages: int, sequences: int, prompts: int | None, tokens: int | None) -> None:
    with pytest.raises(ValueError):
        make_schedule(name, stages, sequences, prompts, tokens)


# -- the page ------------------------------------------------------------------------------------------------------


def unfold(words: str) -> list[str]:
    assert words.startswith("python -m l2_dense_parallel.pipeline.draw")
    return shlex.split(words)[3:]


def test_charts_of_the_page_are_what_its_commands_print(capsys: pytest.CaptureFixture[str]) -> None:
    charts = re.findall(r"<!-- chart (\w+) -->\n(.*?)\n<!-- /chart -->", PAGE, flags=re.DOTALL)
    assert {name for name, _ in charts} == set(NAMES) and PAGE.count("<!-- chart ") == len(charts)
    for name, chart in charts:
        first, *lines = [line.removeprefix("    ") for line in chart.splitlines()]
        assert first.startswith("$ ") and f"--schedule {name} " in first + " "
        assert main(unfold(first.removeprefix("$ "))) == 0
        assert capsys.readouterr().out.splitlines() == lines, f"put what {first} prints into docs/layer2.md"


def test_answers_of_the_page_are_what_its_commands_print(capsys: pytest.CaptureFixture[str]) -> None:
    """Each total that an answer gives in bold, in the order of the exercise's commands."""
    checked = 0
    for exercise in re.split(r"\n(?=\d\. )", PAGE[PAGE.index("## Exercises") :])[1:]:
        commands = re.findall(r"`(python -m l2_dense_parallel\.pipeline\.draw[^`]*)`", exercise)
        totals = re.findall(r"\*\*([\d.]+) ms\*\*", exercise)
        printed = []
        for command in commands:
            assert main(unfold(command)) == 0, command
            found = re.search(r"^total ([\d.]+) ms", capsys.readouterr().out, flags=re.MULTILINE)
            assert found is not None
            printed.append(found[1])
        assert totals == printed, exercise
        checked += len(commands)
    assert checked >= 5


def test_answers_of_the_page_hold_what_its_one_liners_print(capsys: pytest.CaptureFixture[str]) -> None:
    found = re.findall(r"""`python -c "(.*?)"`\n(.*?)</details>""", PAGE, flags=re.DOTALL)
    assert len(found) >= 2
    for program, answer in found:
        exec(program, {})
        assert capsys.readouterr().out.strip() in answer
