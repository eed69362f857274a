"""What a policy made of all items of a set, how it differs from another, and runs over the same items as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

from mosaic.bench.quality.pairing import difference, mcnemar, ratio
from mosaic.errors import UsageError

__all__ = ["Answers", "merged", "together"]


@dataclass(frozen=True, slots=True)
class Answers:
    """What one policy made of all items, in their order, and the seconds it took.

    `exact` and `right` (the share of tokens right at their place) are judgements; `tokens` counts those of the answer with
    [EOS], `forwards` the steps behind the prefill. `decoded` are tokens that these decide, some behind an [EOS]. `processed` are
    those of its block that each computes in all layers, `again` those of the block before. `forced` are tokens of the answer that
    were decided below the schedule's threshold, as a step decides one at least. These are empty where nobody has counted.
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

    @classmethod
    def read(cls, figures: Mapping[str, Any]) -> Self:
        """Return the answers that figures are of."""
        counts = {name: [int(count) for count in figures[name].split()] for name in _COUNTS if name in figures}
        return cls(
            exact=[bool(int(exact)) for exact in figures["exact"]],
            right=[float(right) for right in figures["tokens_right"].split()],
            seconds=figures["seconds"],
            **counts,
        )


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


def merged(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return documents of `compare` over the same items as one: in every schedule all are compared with "exact", or with the first.

    A policy that several have is that of the first. `runs` are the documents.

    Raises
    ------
    UsageError
        If they are of other models or items, or were decoded otherwise.
    """
    first = documents[0]
    if any(_asked(document) != _asked(first) for document in documents):
        raise UsageError("runs of other models, items or batches cannot be compared pair by pair.")
    items = [(item["task"], item["length"]) for item in first["items"]]
    found: dict[str, dict[str, Any]] = {}
    for document in documents:
        for schedule, by_policy in document["schedules"].items():
            for name, figures in by_policy.items():
                found.setdefault(schedule, {}).setdefault(name, figures)
    schedules = {}
    for schedule, by_policy in found.items():
        names = sorted(by_policy, key=lambda name: name != "exact")
        answers = {name: Answers.read(by_policy[name]) for name in names}
        schedules[schedule] = {
            name: by_policy[name] | mine.figures(items, answers[names[0]]) for name, mine in answers.items()
        }
    return {**first, "schedules": schedules, "runs": list(documents)}


def together(documents: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return documents of `compare`, those over the same items as one each (`merged`), in order of the first of them."""
    groups: list[list[Mapping[str, Any]]] = []
    for document in documents:
        group = next((group for group in groups if _asked(group[0]) == _asked(document)), None)
        if group is None:
            groups.append([document])
        else:
            group.append(document)
    return [merged(group) if len(group) > 1 else {**group[0], "runs": group} for group in groups]


def _asked(document: Mapping[str, Any]) -> dict[str, Any]:
    """What pairs have in common."""
    of_run = ("policies", "schedules", "seconds", "replay")
    settings = {name: value for name, value in document["settings"].items() if name not in of_run}
    return {"settings": settings, **{name: document[name] for name in ("model", "card", "dtype", "items")}}
