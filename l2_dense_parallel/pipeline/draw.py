"""Pictures of a simulated schedule: a row a stage, a bar a work. On the command line:

    python -m l2_dense_parallel.pipeline.draw --schedule hybrid --stages 4 --sequences 8 --new-tokens 4 [--svg FILE]

    A==    prompts of micro-batch A; the letters begin anew after Z
    a--    tokens of micro-batch a
    ...    the stage waits

Times are given, not measured: `--prompt-time` is a stage's time of one prompt (bound by operations: two take twice as long), `--token-time`
that of a micro-batch of tokens, however many (bound by reading the stage's weights).
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from l2_dense_parallel.pipeline.schedule import NAMES, Schedule, Work, make_schedule
from l2_dense_parallel.pipeline.simulate import Times, Trace, simulate

PROMPTS, TOKENS = ("#4477aa", "#66aadd"), ("#cc6633", "#eeaa66")  # two shades each: neighbours differ
INSTANT = 1e-9  # ms: a run that is shorter is drawn as one that takes no time
ROW, WIDTH, LEFT = 28, 1000, 70  # of the SVG, in pixels


def letter(work: Work) -> str:
    return chr(ord("a" if work.number else "A") + work.part % 26)


def ascii_chart(trace: Trace, width: int = 100) -> str:
    """Lines of up to `width` characters, the last one a scale; ValueError where that is no room for a chart.

    A column is 1, 2 or 5 times a power of ten, so that equal works look equal wherever they are whole columns. Of a work that is shorter
    only the letter is seen, and where several begin in one column, the last one's.
    """
    left = len(f"stage {trace.stages - 1} ")
    if width < left + 10:
        raise ValueError(f"ascii_chart: a width of {width}, of which the names of the stages take {left}")
    unit = column_unit(trace.total, width - left)
    columns = max(1, round(trace.total / unit))
    lines = []
    for stage in range(trace.stages):
        row = ["."] * columns
        for bar in trace.of(stage):
            start, end = round(bar.start / unit), round(bar.end / unit)
            row[start:end] = ("-" if bar.work.number else "=") * (end - start)
            row[min(start, columns - 1)] = letter(bar.work)
        lines.append(f"stage {stage}".ljust(left) + "".join(row))
    return "\n".join([*lines, f"{'':{left}}a column is {unit:g} ms"])


def column_unit(total: float, columns: int) -> float:
    """The smallest of ..., 0.5, 1, 2, 5, 10, ... of which `columns` hold `total`."""
    if total < INSTANT:
        return 1.0
    power = 10.0 ** math.floor(math.log10(total / columns))
    return next(power * step for step in (1, 2, 5, 10, 20) if total <= columns * power * step * (1 + 1e-9))


def svg_chart(trace: Trace) -> str:
    """The same as a picture: a rectangle a work, with its letter where there is room, its times when pointed at; a dotted line is idle."""
    scale = (WIDTH - LEFT - 10) / max(trace.total, INSTANT)
    height = ROW * trace.stages + 30
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">']
    for stage in range(trace.stages):
        middle = ROW * stage + ROW / 2 + 5
        parts.append(f'<text x="5" y="{middle + 4:g}">stage {stage}</text>')
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 10}" y1="{middle:g}" y2="{middle:g}" stroke="#bbbbbb" stroke-dasharray="2 3"/>')
        for bar in trace.of(stage):
            x, wide = LEFT + bar.start * scale, bar.seconds * scale
            colour = (TOKENS if bar.work.number else PROMPTS)[bar.work.part % 2]
            name = f"pass {bar.work.number}, micro-batch {letter(bar.work)}, {plural(bar.sequences, 'sequence')}"
            box = f'x="{x:.2f}" y="{middle - 11:g}" width="{wide:.2f}" height="22" fill="{colour}" stroke="white"'
            parts.append(f"<rect {box}><title>{name}: {bar.start:g} to {bar.end:g} ms</title></rect>")
            if wide >= 12:
                parts.append(f'<text x="{x + wide / 2:.2f}" y="{middle + 4:g}" text-anchor="middle" fill="white">{letter(bar.work)}</text>')
    parts.append(f'<text x="{LEFT}" y="{height - 8}">0 ms</text>')
    parts.append(f'<text x="{WIDTH - 10}" y="{height - 8}" text-anchor="end">{trace.total:g} ms</text></svg>')
    return "\n".join(parts) + "\n"


def plural(number: int, word: str, ending: str = "s") -> str:
    return f"{number} {word}{ending * (number != 1)}"


def summary(trace: Trace, lockstep: Trace, parts: int) -> str:
    """What the chart shows, in numbers: each stage's bubbles, and what it waits at the start and at the end too."""
    gain = lockstep.total / trace.total if trace.total else 1.0
    bubbles, idle = ([f"{of(stage):g}" for stage in range(trace.stages)] for of in (trace.idle, trace.idle_of_run))
    return (
        f"total {trace.total:g} ms, first tokens {trace.first_token:g} ms; "
        f"lockstep, {plural(parts, 'micro-batch', 'es')}, {lockstep.total:g} ms: {gain:.2f}x\n"
        f"idle between works, ms: {' '.join(bubbles)}; of the whole run: {' '.join(idle)}"
    )


class OneLineParser(argparse.ArgumentParser):
    """A mistake on the command line is one line, as a mistake that is found later."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 1")
    return int(text)


def milliseconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= 1e9:
        raise argparse.ArgumentTypeError(f"{text} is not a time in ms")
    return number


def read_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(prog="python -m l2_dense_parallel.pipeline.draw", description="A pipeline's schedule, simulated and drawn.")

    def number(flag: str, default: float | None, text: str, kind: Callable[[str], float] = at_least_one) -> None:
        parser.add_argument(flag, type=kind, default=default, metavar="MS" if kind is milliseconds else "N", help=text)

    parser.add_argument("--schedule", choices=NAMES, default="hybrid")
    number("--stages", 4, "stages (default 4)")
    number("--sequences", 8, "sequences side by side (default 8)")
    number("--new-tokens", 4, "passes: prompts, then a token a pass (default 4)")
    number("--prompt-micro-batches", None, "default: as many as stages, hybrid twice as many")
    number("--token-micro-batches", None, "default: as many as stages")
    number("--prompt-time", 3.0, "of one prompt on a stage (default 3)", milliseconds)
    number("--token-time", 3.0, "of a micro-batch of tokens on a stage (default 3)", milliseconds)
    number("--send-time", 0.0, "of hidden states to the next stage, and of tokens to stage 0 (default 0)", milliseconds)
    number("--width", 100, "of the chart, in characters (default 100)")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also as a picture")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    try:
        given = read_arguments(arguments)
        schedule = make_schedule(given.schedule, given.stages, given.sequences, given.prompt_micro_batches, given.token_micro_batches)
        times = Times(prompt_each=given.prompt_time, token_fixed=given.token_time, send_hidden=given.send_time, send_tokens=given.send_time)
        trace = simulate(schedule, given.new_tokens, times)
        chart = ascii_chart(trace, given.width)
        if given.svg:
            given.svg.write_text(svg_chart(trace), encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    lockstep = same_in_lockstep(schedule)
    print(chart)
    print(summary(trace, simulate(lockstep, given.new_tokens, times), len(lockstep.token_parts)))
    return 0


def same_in_lockstep(schedule: Schedule) -> Schedule:
    """As training would do it: its micro-batches of tokens, for prompts too."""
    return Schedule("lockstep", schedule.stages, schedule.token_parts, schedule.token_parts, drains=True)


if __name__ == "__main__":
    sys.exit(main())
