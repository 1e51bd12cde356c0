"""The simulator against the rules of schedule.py, written down a second time here, and against totals that can be had with a pencil."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from l2_dense_parallel.pipeline.draw import ascii_chart, column_unit, main, svg_chart
from l2_dense_parallel.pipeline.schedule import NAMES, Schedule, Work, divided, make_schedule
from l2_dense_parallel.pipeline.simulate import Times, Trace, simulate

MILLISECONDS = st.floats(0, 20, allow_nan=False)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Schedule, int, Times, list[int]]:
    """A schedule, passes, times of every kind, and lengths."""
    name, stages, sequences = draw(st.sampled_from(NAMES)), draw(st.integers(1, 6)), draw(st.integers(1, 13))
    prompts = draw(st.none() | st.integers(1, 15))
    tokens = draw(st.none() | st.integers(1, 15)) if name == "hybrid" else prompts
    passes = draw(st.integers(1, 5))
    slowness = draw(st.just(()) | st.tuples(*[st.floats(0.1, 3)] * stages))
    times = Times(*(draw(MILLISECONDS) for _ in range(6)), slowness=slowness)
    ended = draw(st.lists(st.integers(1, passes), min_size=sequences, max_size=sequences))
    return make_schedule(name, stages, sequences, prompts, tokens), passes, times, ended


def seconds(times: Times, stage: int, number: int, sequences: int) -> float:
    fixed, each = (times.prompt_fixed, times.prompt_each) if number == 0 else (times.token_fixed, times.token_each)
    return (fixed + sequences * each) * (times.slowness[stage] if times.slowness else 1)


@given(cases())
def test_no_rule_is_broken_and_nothing_is_late(case: tuple[Schedule, int, Times, list[int]]) -> None:
    """Each work begins at the end of the last of what it waits for: never before it, and never after. Needs no events: works in order."""
    schedule, passes, times, ended = case
    trace = simulate(schedule, passes, times, ended)
    shown = {(bar.stage, bar.work.number, bar.work.part): bar for bar in trace.bars}
    assert len(shown) == len(trace.bars)
    last = schedule.stages - 1
    back = times.send_tokens if last else 0.0
    free = [0.0] * schedule.stages  # when each stage may begin its next work
    for number in range(passes):
        for part, members in enumerate(schedule.token_parts if number else schedule.prompt_parts):
            living = [i for i in members if ended[i] > number]
            if number:  # the tokens of the pass before, for a work too that they leave empty: until then nobody knows that
                for before, others in enumerate(schedule.token_parts if number > 1 else schedule.prompt_parts):
                    wanted = [i for i in others if ended[i] >= number and (schedule.name == "lockstep" or set(others) & set(members))]
                    if wanted:
                        free[0] = max(free[0], shown[last, number - 1, before].end + back)
            arrival = 0.0
            for stage in range(schedule.stages):
                bar = shown.get((stage, number, part))
                assert (bar is not None) == bool(living)
                if bar is not None:
                    assert bar.sequences == len(living)
                    assert bar.start == pytest.approx(max(free[stage], arrival))
                    assert bar.end - bar.start == pytest.approx(seconds(times, stage, number, len(living)))
                    free[stage], arrival = bar.end, bar.end + times.send_hidden


@given(cases())
def test_what_a_trace_adds_up_to(case: tuple[Schedule, int, Times, list[int]]) -> None:
    schedule, passes, times, ended = case
    trace = simulate(schedule, passes, times, ended)
    assert trace.total == max(bar.end for bar in trace.bars)
    prompts = [bar.end for bar in trace.bars if bar.stage == schedule.stages - 1 and bar.work.number == 0]
    assert len(prompts) == len(schedule.prompt_parts) and trace.first_token == max(prompts)
    for stage in range(schedule.stages):
        bars = trace.of(stage)
        gaps = sum(after.start - before.end for before, after in zip(bars, bars[1:], strict=False))
        assert trace.idle(stage) == pytest.approx(gaps, abs=1e-9)
        assert trace.idle_of_run(stage) == pytest.approx(gaps + bars[0].start + trace.total - bars[-1].end, abs=1e-9)
        assert sum(bar.sequences for bar in bars) == sum(ended)  # every sequence once a pass, as long as it lives


def equal(name: str, stages: int, parts: int, passes: int, t: float = 1.0, **links: float) -> Trace:
    return simulate(make_schedule(name, stages, parts, parts, parts), passes, Times(prompt_fixed=t, token_fixed=t, **links))


@given(stages=st.integers(1, 7), more=st.integers(0, 5), passes=st.integers(1, 6), t=st.floats(0.01, 50))
def test_totals_of_equal_works(stages: int, more: int, passes: int, t: float) -> None:
    """With at least as many micro-batches as stages, the pipeline fills once when queued, and once a pass in lockstep."""
    parts = stages + more
    for name in ("queued", "hybrid"):
        trace = equal(name, stages, parts, passes, t)
        assert trace.total == pytest.approx((passes * parts + stages - 1) * t)
        assert all(trace.idle(stage) == pytest.approx(0, abs=1e-6) for stage in range(stages))
    lockstep = equal("lockstep", stages, parts, passes, t)
    assert lockstep.total == pytest.approx(passes * (parts + stages - 1) * t)
    assert lockstep.idle_of_run(0) == pytest.approx(passes * (stages - 1) * t, abs=1e-6)
    assert lockstep.first_token == pytest.approx((parts + stages - 1) * t)


@given(stages=st.integers(2, 7), passes=st.integers(1, 6), data=st.data())
def test_fewer_micro_batches_than_stages_wait_for_their_way_round(stages: int, passes: int, data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, stages))
    assert equal("queued", stages, parts, passes).total == pytest.approx(passes * stages + parts - 1)
    alone = equal("queued", stages, 1, passes, send_hidden=0.25, send_tokens=0.5)
    assert alone.total == pytest.approx(passes * (stages + 0.25 * (stages - 1)) + 0.5 * (passes - 1))


def test_one_stage_has_nothing_to_send() -> None:
    assert equal("queued", 1, 3, 4, send_hidden=9, send_tokens=9).total == 12


@given(stages=st.integers(2, 6), size=st.integers(1, 3), passes=st.integers(1, 6), prompt=st.floats(0.1, 10), token=st.floats(0.1, 10))
def test_hybrid_gains_where_prompts_are_bound_by_operations_and_tokens_by_weights(
    stages: int, size: int, passes: int, prompt: float, token: float
) -> None:
    """Against both numbers of micro-batches that `queued` could have. First tokens always come sooner than with few of them. The end comes
    sooner if a work of prompts takes longer than one of tokens; otherwise the last stage waits for tokens whatever came before them."""
    sequences, times = 2 * stages * size, Times(prompt_each=prompt, token_fixed=token)
    hybrid = simulate(make_schedule("hybrid", stages, sequences), passes, times)
    few = simulate(make_schedule("queued", stages, sequences), passes, times)
    many = simulate(make_schedule("queued", stages, sequences, 2 * stages), passes, times)
    lockstep = simulate(make_schedule("lockstep", stages, sequences), passes, times)
    assert hybrid.first_token == pytest.approx(many.first_token) and hybrid.first_token < few.first_token
    gain = few.total - hybrid.total
    if passes == 1 or token < 0.99 * 2 * size * prompt:
        assert gain > 0
    else:
        assert gain >= -1e-9
    if passes > 1:
        assert hybrid.total < many.total and hybrid.total < lockstep.total


def test_a_slow_stage_sets_the_pace() -> None:
    trace = simulate(make_schedule("queued", 3, 3), 4, Times(prompt_fixed=1, token_fixed=1, slowness=(1, 2, 1)))
    assert trace.total == 1 + 4 * 3 * 2 + 1 and trace.idle(1) == 0


def test_sequences_that_end() -> None:
    """Two stages, micro-batches {0, 1} and {2, 3}; 0 ends after its prompt, 2 and 3 after one token more."""
    schedule, times = make_schedule("queued", 2, 4), Times(prompt_fixed=4, token_each=1)
    trace = simulate(schedule, 4, times, ended=[1, 4, 2, 2])
    seen = [(bar.work.number, bar.work.part, bar.sequences, bar.start, bar.end) for bar in trace.of(0)]
    assert seen == [(0, 0, 2, 0, 4), (0, 1, 2, 4, 8), (1, 0, 1, 8, 9), (1, 1, 2, 12, 14), (2, 0, 1, 14, 15), (3, 0, 1, 17, 18)]
    assert trace.total == 19 and trace.of(1)[-1].work == Work(3, 0)


def test_a_micro_batch_that_has_ended_is_left_out() -> None:
    """Micro-batch 1 ends with its prompt, at 12; micro-batch 0 has the pipeline to itself from then on."""
    schedule, times = make_schedule("queued", 2, 2), Times(prompt_fixed=4, token_fixed=1)
    trace = simulate(schedule, 4, times, ended=[4, 1])
    assert [(bar.work, bar.start) for bar in trace.of(0)][2:] == [(Work(1, 0), 8), (Work(2, 0), 13), (Work(3, 0), 15)]
    assert trace.of(1)[2].start == 12 and trace.total == 17
    trace = simulate(schedule, 4, times, ended=[1, 1])
    assert trace.total == trace.first_token == 12 and len(trace.bars) == 4


@pytest.mark.parametrize("ended", [[1], [1, 2, 3], [0, 1]])
def test_lengths_that_fit_nothing(ended: list[int]) -> None:
    with pytest.raises(ValueError, match="of 2 sequences"):
        simulate(make_schedule("queued", 2, 2), 3, Times(), ended)


def test_times_that_fit_nothing() -> None:
    for bad in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="at least 0"):
            Times(send_hidden=bad)
    with pytest.raises(ValueError, match="2 values of slowness for 3 stages"):
        simulate(make_schedule("queued", 3, 3), 1, Times(slowness=(1, 1)))
    with pytest.raises(ValueError, match="0 passes"):
        simulate(make_schedule("queued", 3, 3), 0, Times())


class WaitsForItself(Schedule):
    """A micro-batch that wants the tokens of its own pass."""

    def tokens_from(self, work: Work) -> tuple[Work, ...]:
        return (work,) if work.number == 1 else super().tokens_from(work)


def test_a_schedule_that_waits_for_ever_is_found_out() -> None:
    with pytest.raises(RuntimeError, match=r"stage 0 waits for ever before Work\(number=1, part=0\)"):
        simulate(WaitsForItself("queued", 2, divided(4, 2), divided(4, 2), False), 2, Times())


# -- pictures ------------------------------------------------------------------------------------------------------

HYBRID = """\
stage 0 A==B==C==D==a---.b---.a---.b---....
stage 1 ...A==B==C==D==.a---.b---.a---.b---
        a column is 1 ms"""


def small() -> Trace:
    return simulate(make_schedule("hybrid", 2, 4), 3, Times(prompt_each=3, token_fixed=4, send_tokens=2))


def test_the_chart_of_a_small_case() -> None:
    assert ascii_chart(small(), 60) == HYBRID


@given(cases(), st.integers(20, 150))
def test_charts_are_as_wide_as_they_may_be(case: tuple[Schedule, int, Times, list[int]], width: int) -> None:
    schedule, passes, times, ended = case
    trace = simulate(schedule, passes, times, ended)
    *rows, scale = ascii_chart(trace, width).splitlines()
    assert len(rows) == schedule.stages and len({len(row) for row in rows}) == 1 and len(rows[0]) <= width
    assert all(set(row[8:]) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz=-.") for row in rows)


@pytest.mark.parametrize("total, columns, unit", [(84, 92, 1), (92, 92, 1), (93, 92, 2), (0.3, 100, 0.005), (700, 92, 10), (0, 92, 1)])
def test_column_unit(total: float, columns: int, unit: float) -> None:
    assert column_unit(total, columns) == pytest.approx(unit)


def test_a_chart_without_room() -> None:
    with pytest.raises(ValueError, match="a width of 17"):
        ascii_chart(small(), 17)


@given(cases())
def test_the_picture_has_a_rectangle_a_work(case: tuple[Schedule, int, Times, list[int]]) -> None:
    schedule, passes, times, ended = case
    trace = simulate(schedule, passes, times, ended)
    boxes = [box for box in ElementTree.fromstring(svg_chart(trace)).iter() if box.tag.endswith("rect")]
    assert len(boxes) == len(trace.bars)
    assert all(69.99 <= float(box.attrib["x"]) and float(box.attrib["x"]) + float(box.attrib["width"]) <= 990.02 for box in boxes)


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = "--schedule hybrid --stages 2 --sequences 4 --new-tokens 3 --prompt-time 3 --token-time 4"
    assert main([*words.split(), "--width", "50", "--svg", str(tmp_path / "chart.svg")]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[:2] == ["stage 0 A==B==C==D==a---b---a---b---....", "stage 1 ...A==B==C==D==.a---b---a---b---"]
    # 12 of prompts, 4 works of tokens, and the last one's way through stage 1; lockstep: (2 + 1) * 6 + 2 * (2 + 1) * 4
    assert shown[3] == "total 32 ms, first tokens 15 ms; lockstep, 2 micro-batches, 42 ms: 1.31x"
    assert shown[4] == "idle between works, ms: 0 1; of the whole run: 4 4"
    ElementTree.parse(tmp_path / "chart.svg")


@pytest.mark.parametrize(
    "words, cause",
    [
        ("--stages 0", "--stages"),
        ("--sequences -3", "--sequences"),
        ("--new-tokens many", "--new-tokens"),
        ("--token-micro-batches 0", "--token-micro-batches"),
        ("--prompt-time -1", "--prompt-time"),
        ("--token-time nan", "--token-time"),
        ("--token-time soon", "--token-time"),
        ("--send-time 1e308", "--send-time"),
        ("--schedule greedy", "hybrid"),
        ("--schedule queued --prompt-micro-batches 3 --token-micro-batches 2", "not 3 and 2"),
        ("--width 9", "width"),
        ("--svg no/such/folder/chart.svg", "No such file"),
        ("--colour", "--colour"),
    ],
)
def test_mistakes_are_one_line(words: str, cause: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("error: ") and said.err.count("\n") == 1 and cause in said.err
