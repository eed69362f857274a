"""Make a failing program smaller: leave out statements, open loops, as long as it fails in the same way."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

from .language import (
    Alias,
    Beside,
    Body,
    Call,
    Choose,
    Declare,
    Keep,
    Loop,
    Mark,
    Program,
    Statement,
    Wait,
    parts,
    walk,
    with_parts,
)  # fmt: skip

__all__ = ["shrink"]


def shrink(program: Program, fails: Callable[[Program], bool], *, seconds: float = 60.0) -> Program:
    """The smallest program found that `fails` says yes to; greedy, within a time."""
    deadline = time.monotonic() + seconds
    smaller = True
    while smaller:
        smaller = False
        for candidate in _smaller(program):
            if time.monotonic() > deadline:
                return program
            if _size(candidate) < _size(program) and fails(candidate):
                program, smaller = candidate, True
                break
    return program


def _size(program: Program) -> tuple[int, int, int]:
    statements = list(walk(program.body))
    return (
        len(statements),
        sum(isinstance(s, Loop | Choose) for s in statements),
        sum(d.value for d in program.dims.values()),
    )


def _smaller(program: Program) -> Iterator[Program]:
    """Programs with less: halves of bodies first, then single statements, then smaller dims."""
    for body in _less(program.body):
        kept = _pruned(body)
        if any(isinstance(s, Call) for s in walk(kept)) and _is_joined(kept, program.body):
            yield replace(program, body=kept)
    if program.steps > 1:
        yield replace(program, steps=1)
    for name, dim in program.dims.items():
        for value in {max(1, dim.value // 2), dim.value - 1} - {0, dim.value}:
            yield replace(program, dims={**program.dims, name: replace(dim, value=value)})


def _is_joined(body: Body, before: Body) -> bool:
    """Whether no wait is gone whose side ops are still there."""
    waits, sides = (
        [Counter(s.stream for s in walk(b) if isinstance(s, kind)) for b in (before, body)] for kind in (Wait, Beside)
    )
    return all(waits[0][x] - waits[1][x] <= sides[0][x] - sides[1][x] for x in waits[0])


def _less(body: Body) -> Iterator[Body]:
    count = len(body)
    size = count // 2
    while size >= 1:
        for start in range(0, count, size):
            yield body[:start] + body[start + size :]
        size //= 2
    for i, s in enumerate(body):
        for k, inner in enumerate(parts(s)):
            yield body[:i] + inner + body[i + 1 :]
            for less in _less(inner):
                bodies = [less if j == k else part for j, part in enumerate(parts(s))]
                yield (*body[:i], with_parts(s, bodies), *body[i + 1 :])


def _pruned(body: Body) -> Body:
    """Without what refers to things that are gone, and what nothing refers to."""
    while True:
        kept = _unused_gone(_prune(body, {}, set(), set()))
        if kept == body:
            return kept
        body = kept


def _prune(body: Body, known: dict[str, bool], streams: set[str], marks: set[str]) -> Body:
    """`known` says of every buffer whether it holds a value."""
    kept: list[Statement] = []
    for s in body:
        match s:
            case Declare():
                known.setdefault(s.name, bool(s.fill))
            case Call():
                if not all(known.get(name) for name in s.reads if name is not None) or (
                    s.into and not set(s.writes) <= known.keys()
                ):
                    continue
                known |= dict.fromkeys(s.writes, True)
            case Wait():
                if s.stream not in streams:
                    continue
            case Mark():
                marks.add(s.label)
            case Keep():
                names = tuple(name for name in s.names if known.get(name))
                s = replace(s, names=names, since=s.since if s.since in marks else None)
                if not names:
                    continue
            case Alias():
                if not {s.name, s.of} <= known.keys():
                    continue
            case Choose():
                branches = [dict(known) for _ in s.options]
                s = with_parts(
                    s, [_prune(part, branch, streams, marks) for part, branch in zip(parts(s), branches, strict=True)]
                )
                known |= {name: all(branch[name] for branch in branches) for name in known}
            case Loop() | Beside():
                inner = _prune(s.body, known, streams, marks)
                if not any(isinstance(x, Call) for x in walk(inner)):
                    continue
                if isinstance(s, Beside):
                    streams.add(s.stream)
                s = with_parts(s, [inner])
        kept.append(s)
    return tuple(kept)


def _unused_gone(body: Body) -> Body:
    """Without declarations of buffers that no op touches."""
    used: set[str] = set()
    for s in walk(body):
        if isinstance(s, Call):
            used |= {name for name in (*s.reads, *s.writes) if name is not None}
    return _declared(body, used)


def _declared(body: Body, used: set[str]) -> Body:
    kept = []
    for s in body:
        if isinstance(s, Declare) and s.name not in used:
            continue
        kept.append(with_parts(s, [_declared(part, used) for part in parts(s)]) if parts(s) else s)
    return tuple(kept)
