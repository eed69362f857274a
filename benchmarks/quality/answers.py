"""A policy's answers to all items of a set, and its difference from another's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from benchmarks.quality.pairing import difference, mcnemar, ratio

__all__ = ["Answers"]


@dataclass(frozen=True, slots=True)
class Answers:
    """One policy's answers to all items, in order, and its seconds.

    `exact` and `right` (the share of tokens right at their place) are judgements; `tokens` counts those of the answer with
    [EOS], `forwards` the steps behind the prefill. `decoded` are tokens that these decide, some behind an [EOS]. `processed` are
    those that each computes in all layers, of its block alone if the model attends by blocks, `again` those of the block before.
    `forced` are tokens of the answer that were decided below the schedule's threshold, as a step decides at least one. They are
    empty if not counted.
    """

    exact: list[bool]
    right: list[float]
    tokens: list[int]
    forwards: list[int]
    seconds: float
    decoded: list[int] = field(default_factory=list)
    processed: list[int] = field(default_factory=list)
    again: list[int] = field(default_factory=list)
    forced: list[int] = field(default_factory=list)

    def figures(self, items: Sequence[tuple[str, int]], baseline: Answers) -> dict[str, Any]:
        """Return figures of all answers, of each task, and of each task and length; against a baseline unless it is this one.

        `items` are their tasks and lengths.
        """
        groups: dict[str, list[int]] = {"all": list(range(len(items)))}
        for index, (task, length) in enumerate(items):
            groups.setdefault(task, []).append(index)
            if length:
                groups.setdefault(f"{task}, {length}", []).append(index)
        return {
            "seconds": self.seconds,
            "tokens_per_s": sum(self.tokens) / self.seconds,
            "groups": {name: _group(members, self, baseline) for name, members in groups.items()},
            "exact": "".join(str(int(exact)) for exact in self.exact),
            **{name: " ".join(map(str, values)) for name in _COUNTS if (values := getattr(self, name))},
            "tokens_right": " ".join(f"{right:.4f}" for right in self.right),
        }


_COUNTS: Final = ("tokens", "forwards", "decoded", "processed", "again", "forced")


def _group(members: Sequence[int], answers: Answers, baseline: Answers) -> dict[str, Any]:
    """Means over some answers, and how they differ from the baseline's."""

    def of(values: Sequence[Any]) -> list[Any]:
        return [values[index] for index in members]

    count, forwards = len(members), sum(of(answers.forwards))
    found: dict[str, Any] = {
        "count": count,
        "exact": sum(of(answers.exact)) / count,
        "tokens_right": sum(of(answers.right)) / count,
        "forwards": forwards / count,
        "tokens_per_forward": sum(of(answers.tokens)) / forwards,
    }
    if answers.decoded:
        decoded = sum(of(answers.decoded))
        found["processed_per_decoded"] = sum(of(answers.processed)) / decoded
        found["again_per_decoded"] = sum(of(answers.again)) / decoded
    if answers.forced:
        found["forced"] = sum(of(answers.forced)) / count
    if answers is not baseline:
        gained = sum(a and not b for a, b in zip(of(answers.exact), of(baseline.exact), strict=True))
        losing = [b and not a for a, b in zip(of(answers.exact), of(baseline.exact), strict=True)]
        lost = sum(losing)
        found["against"] = {
            "exact": {
                **difference(of(answers.exact), of(baseline.exact)), "gained": gained, "lost": lost,
                "p": mcnemar(gained, lost),
            },
            "tokens_right": difference(of(answers.right), of(baseline.right)),
            "forwards": ratio(of(answers.forwards), of(baseline.forwards)),
        }  # fmt: skip
        if answers.forced:
            forced = zip(losing, of(answers.forced), strict=True)
            found["against"]["exact"]["lost_forced"] = sum(one and count > 0 for one, count in forced)
    return found
