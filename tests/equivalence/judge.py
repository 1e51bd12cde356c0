"""Compares one observation with its reference: golden values (fp32, whole model) or a float64 run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from tests.conformance.check import compare
from tests.equivalence.observe import Observation
from tests.equivalence.settings import BARS, ROUTING_FLIPS, WIDER, Setting

EXCUSED_SHARE = 0.02  # of a setting's steps may differ in a token, and only where the two best are that close


@dataclass
class Verdict:
    """Over all cases of a setting. `faults` is empty when the setting holds."""

    faults: list[str] = field(default_factory=list)
    steps: int = 0
    excused: int = 0
    worst: dict[str, float] = field(default_factory=dict)  # case -> largest error over its bar

    def close(self) -> None:
        if self.excused > EXCUSED_SHARE * self.steps:
            self.faults.append(f"{self.excused} of {self.steps} steps chose another token within the margin; {EXCUSED_SHARE:.0%} may")

    def summary(self) -> str:
        case, share = max(self.worst.items(), key=lambda item: item[1], default=("-", 0.0))
        return f"{len(self.worst)} cases, {self.steps} steps, {self.excused} excused, worst {share:.3f} of the bar ({case})"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def bar_of(setting: Setting, case: dict[str, Any]) -> float:
    if setting.dtype == "fp32":
        return min(BARS["fp32"], case["meta"]["rel_tolerance"])
    return max(BARS[setting.numbers], WIDER.get((setting.numbers, case["name"]), 0.0))


def judge(verdict: Verdict, setting: Setting, case: dict[str, Any], got: Observation, want: Observation) -> None:
    bar, name = bar_of(setting, case), case["name"]
    mask = case.get("attention_mask")
    flips = ROUTING_FLIPS.get((setting.numbers, name), 0.0)
    verdict.worst.setdefault(name, 0.0)
    for array in got:
        if array == "ppl_nll":
            error = abs(float(got[array]) - float(want[array])) / max(1.0, abs(float(want[array])))
            result = {"ok": bool(error <= bar), "rel_error": error}
        elif flips:
            result = _compare_most(got[array], want[array], bar, flips)
        else:
            result = compare(got[array], want[array], bar, mask)
        verdict.worst[name] = max(verdict.worst[name], float(result.get("rel_error", np.inf)) / bar)
        if not result["ok"]:
            verdict.faults.append(f"{name} {array}: {result}")
        elif array == "pad_logits" and "pad_tokens" in want and (got[array].argmax(-1) != want["pad_tokens"]).any():
            verdict.faults.append(f"{name}: other tokens than the golden pad_tokens")
        elif array in ("greedy_logits", "pad_logits") and not flips:
            _count_tokens(verdict, f"{name} {array}", bar, got[array], want[array])


def _compare_most(got: np.ndarray, want: np.ndarray, bar: float, may_differ: float) -> dict[str, Any]:
    """The error of the positions that are left when the worst `may_differ` of them are set aside."""
    if got.shape != want.shape or not np.isfinite(got).all():
        return {"ok": False, "why": f"shape {got.shape} for {want.shape}, or not finite"}
    errors = np.sort((np.abs(got - want).max(-1) / np.abs(want).max()).ravel())
    kept = float(errors[int(np.ceil(len(errors) * (1 - may_differ))) - 1])
    return {"ok": kept <= bar, "rel_error": kept}


def _count_tokens(verdict: Verdict, where: str, bar: float, got: np.ndarray, want: np.ndarray) -> None:
    ordered = np.sort(want, axis=-1)
    wide = ordered[..., -1] - ordered[..., -2] > 2 * bar * np.abs(want).max()
    differs = got.argmax(-1) != want.argmax(-1)
    verdict.steps += differs.size
    verdict.excused += int((differs & ~wide).sum())
    if (differs & wide).any():
        verdict.faults.append(f"{where}: another token at {np.argwhere(differs & wide).tolist()} in spite of a wide margin")
