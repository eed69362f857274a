"""From a model and a request to a plan: search, place, assemble.

`plan` is the one-call form. A `Planner` keeps what is compiled, so that further
requests cost milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import count
from math import ceil
from numbers import Real
from pathlib import Path
from typing import Any, Final, TypeAlias

from mosaic.devices import Device, load_device
from mosaic.errors import UnsafePlan, UsageError
from mosaic.models import Model, load
from mosaic.models.phase import FULL_STEP, Phase
from mosaic.models.safetensors import Layout
from mosaic.planner.cache import template_of
from mosaic.planner.check import prove_safe
from mosaic.planner.document import Draft, assemble
from mosaic.planner.limits import DimsAt, max_context, search_and_place, smallest_total
from mosaic.planner.placement import place
from mosaic.planner.plan import Plan
from mosaic.planner.search import SearchResult
from mosaic.planner.space import Config, Point, Space
from mosaic.units import Size, parse_bytes, parse_lengths, parse_tokens
from mosaic.version import __version__

__all__ = ["DEFAULT_MASK_RATIO", "Planner", "Progress", "Request", "plan", "plan_point", "read_budgets"]

DEFAULT_MASK_RATIO: Final = 0.5
Progress: TypeAlias = Callable[[int, str], None]
"""Told (how many bodies have been compiled, the name of the next) before each."""
MAX_TOKENS: Final = 2**31 - 1
"""Positions and sequence bounds are int32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One step to plan. Counts are integers of any kind, or text like "128k".

    Parameters
    ----------
    seq_lens
        Tokens of each packed sequence; where keys are cached, of each window. One number is one sequence.
    masked
        Rows to unembed; None for `mask_ratio` of the tokens, rounded up.
    mask_ratio
        Share of masked tokens, in (0, 1].
    logit_rows
        Rows whose logits are returned as well; 0 for statistics only.
    phase
        The kind of step; the whole sequence with statistics of its masked rows, if not given.
    key_lens
        Of cached phases: keys that each window sees, itself included.
    kv_rows
        Rows of the state, for all sequences that are open; of cached phases the keys if not given, of others none.
    """

    seq_lens: tuple[int, ...]
    masked: int | None = None
    mask_ratio: float = DEFAULT_MASK_RATIO
    logit_rows: int = 0
    phase: Phase = FULL_STEP
    key_lens: tuple[int, ...] = ()
    kv_rows: int | None = None

    def __post_init__(self) -> None:
        self._read_counts()
        if not self.seq_lens:
            raise UsageError("a request needs at least one sequence.")
        if self.tokens > MAX_TOKENS:
            raise UsageError(f"at most {MAX_TOKENS:,} tokens (positions are 32-bit), got {self.tokens:,}.")
        if self.masked is None and not (_is_number(self.mask_ratio) and 0 < self.mask_ratio <= 1):
            raise UsageError(f"the mask ratio must be in (0, 1], got {self.mask_ratio!r}.")
        if self.masked is not None and not 1 <= self.masked <= self.tokens:
            raise UsageError(f"masked rows must be between 1 and the {self.tokens:,} tokens, got {self.masked:,}.")
        if not 0 <= self.logit_rows <= self.tokens:
            raise UsageError(f"logit rows must be between 0 and the {self.tokens:,} tokens, got {self.logit_rows:,}.")
        self._check_keys()

    def _read_counts(self) -> None:
        """Numbers and text to ints."""
        for name, what in (("seq_lens", "a context"), ("key_lens", "a number of keys")):
            object.__setattr__(self, name, parse_lengths(getattr(self, name), what=what))
        for name in ("masked", "logit_rows", "kv_rows"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, parse_tokens(value, what=name, least=0))

    def _check_keys(self) -> None:
        if not self.phase.cached:
            if self.key_lens:
                raise UsageError("key_lens are for cached phases.")
            return
        if len(self.key_lens) != len(self.seq_lens):
            raise UsageError(f"{len(self.seq_lens)} windows need as many numbers of keys, got {len(self.key_lens)}.")
        for window, keys in zip(self.seq_lens, self.key_lens, strict=True):
            if keys < window:
                raise UsageError(f"a window of {window:,} tokens sees at least its own keys, got {keys:,}.")
        if self.kv_rows is not None and self.kv_rows < max(self.key_lens):
            raise UsageError(f"{max(self.key_lens):,} keys do not fit {self.kv_rows:,} rows of the state.")

    @property
    def tokens(self) -> int:
        """Packed total of all sequences."""
        return sum(self.seq_lens)

    @property
    def kind(self) -> Phase:
        """The phase, with logits where they are asked for, and with the state where others have rows of it."""
        held = bool(self.kv_rows) and not self.phase.cached
        return replace(self.phase, logits=self.phase.logits or bool(self.logit_rows), held=self.phase.held or held)

    def dims(self, block: int = 0) -> dict[str, int]:
        """Values of the symbolic dims: tokens, seqs, span, masked where there is a head, logit_rows where asked for,
        keys where cached, and kv_rows where there is a state; `block` is the model's, if its attention is causal by blocks."""
        keys = self.key_lens or self.seq_lens
        pairs = sum(_pairs(n, k, block) for n, k in zip(self.seq_lens, keys, strict=True))
        return self._dims(self.tokens, len(self.seq_lens), -(-pairs // self.tokens), sum(self.key_lens), self.kv_rows)

    def dims_at(self, context: int, block: int = 0) -> dict[str, int]:
        """The dims of one sequence of another length, the mask ratio (or the masked rows) kept; where keys are cached and
        there is a head, the window is as it was and the keys are as many. Rows that others hold are kept, too."""
        window = min(max(self.seq_lens), context) if self.phase.cached and self.phase.head != "none" else context
        others = max((self.kv_rows or 0) - sum(self.key_lens), 0)
        kv_rows = others + context if self.phase.cached else others
        return self._dims(window, 1, -(-_pairs(window, context, block) // window), context, kv_rows)

    def _dims(self, tokens: int, seqs: int, span: int, keys: int, kv_rows: int | None) -> dict[str, int]:
        copies = 2 if self.phase.guided else 1
        dims = {"tokens": tokens * copies, "seqs": seqs * copies, "span": span}
        if self.phase.head != "none":
            share = ceil(Fraction(str(self.mask_ratio)) * tokens)
            dims["masked"] = min(self.masked, tokens) if self.masked is not None else max(1, share)
        if self.logit_rows:
            dims["logit_rows"] = min(self.logit_rows, tokens)
        if self.phase.cached:
            dims |= {"keys": keys, "kv_rows": keys if kv_rows is None else kv_rows}
        elif kv_rows:
            dims["kv_rows"] = kv_rows
        return dims


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _pairs(window: int, keys: int, block: int) -> int:
    """Keys that the queries of a window at the end of its keys see, all queries together.

    >>> _pairs(8, 8, 0), _pairs(8, 8, 4), _pairs(4, 8, 4), _pairs(3, 7, 4)
    (64, 48, 32, 21)
    """
    if not block:
        return window * keys
    first, whole = keys - window, keys // block * block
    beyond = (keys - max(whole, first)) * (whole + block - keys) if keys > whole else 0
    return _causal_pairs(keys, block) - _causal_pairs(first, block) - beyond


def _causal_pairs(queries: int, block: int) -> int:
    """Keys that the first so many queries see, each to the end of its block."""
    blocks, rest = divmod(queries, block)
    return block * block * blocks * (blocks + 1) // 2 + rest * (blocks + 1) * block


class Planner:
    """Plans requests for one model on one device.

    Parameters
    ----------
    model
        A `Model`, a preset's name, or a checkpoint directory.
    device
        A `Device` or its name; the built-in rtx-4090 if not given.
    budget
        What the process may take on the device, in bytes or like "24GiB"; its whole memory by default.
    host_budget
        Pinned host memory that weights and hidden states may take, 0 for none; what the device's profile says by default.
    pinned
        Choices that are not free, such as {"stream": "all"}.
    progress
        Called before something is compiled, which takes seconds where the cache is empty: how many bodies the planner has
        compiled so far, and the name of the next.

    Examples
    --------
    >>> planner = Planner("llada-8b", device="rtx-3090")
    >>> planner.plan(Request(seq_lens=(32768,))).fits
    True
    """

    def __init__(
        self,
        model: Model | str | Path,
        *,
        device: Device | str | None = None,
        budget: Size | None = None,
        host_budget: Size | None = None,
        pinned: Mapping[str, str] | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.model = model if isinstance(model, Model) else load(model)
        self.device = load_device(device)
        self.budget_bytes, self.host_budget_bytes = read_budgets(self.device, budget, host_budget)
        self.pinned = dict(pinned or {})
        self._spaces: dict[Phase, Space] = {}
        self._longest: dict[tuple[Any, ...], int] = {}
        self._progress, self._compiled = progress, count()

    def with_pinned(self, pinned: Mapping[str, str]) -> Planner:
        """The same planner with more choices pinned; what it has compiled is shared."""
        other = copy(self)
        other.pinned = {**self.pinned, **pinned}
        return other

    def with_budgets(self, *, budget: Size | None = None, host_budget: Size | None = None) -> Planner:
        """The same planner with another budget of the device, of pinned host memory, or both; what it has compiled is shared."""
        other = copy(self)
        other.budget_bytes, other.host_budget_bytes = read_budgets(
            self.device,
            self.budget_bytes if budget is None else budget,
            self.host_budget_bytes if host_budget is None else host_budget,
        )
        return other

    def space(self, phase: Phase = FULL_STEP) -> Space:
        """The configurations of one kind of step."""
        if phase not in self._spaces:
            template = template_of(self.model, backend=self.device.backend, phase=phase, watcher=self._report)
            self._spaces[phase] = Space(template, self.device)
        return self._spaces[phase]

    def _report(self, name: str) -> None:
        if self._progress is not None:
            self._progress(next(self._compiled), name)

    def at(self, request: Request) -> Point:
        """The space at a request's dims."""
        return self.space(request.kind).at(request.dims(self.model.architecture.block), pinned=self.pinned)

    def _dims_at(self, request: Request) -> DimsAt:
        return partial(request.dims_at, block=self.model.architecture.block)

    def verify_checkpoint(self) -> None:
        """Make sure that the model's directory, if it has weights, holds every tensor in its shape, by headers alone.

        Raises
        ------
        CheckpointError
            Naming file, tensor, what was expected and what was found.
        """
        if self.model.path is None or not Layout.exists(self.model.path):
            return
        template = self.space().template
        body = template.first
        values = [dim.value or 1 for dim in template.dims] + [1] * len(template.knobs)
        sizes = body.evaluate(values).tolist()
        weights = [
            (b.tensor, tuple(sizes[row] for row in b.shape))
            for b in body.buffers
            if b.kind == "weight" and b.tensor is not None
        ]
        Layout(self.model.path).verify(weights, self.model.architecture)

    def plan(
        self,
        request: Request,
        *,
        solver: str = "auto",
        config: Mapping[str, int | str | None] | None = None,
        limit: bool = True,
    ) -> Plan:
        """Plan one request; a plan that does not fit says so, it is not an error.

        Parameters
        ----------
        config
            Take this configuration instead of searching: rows per chunk by knob, an option by choice. What is not named
            is off, or the first option. For ablations and tests; the search finds better ones.
        limit
            Solve the largest context as well; otherwise `max_ctx_tokens` is this one, where it fits.
        """
        identity = {"model": self.model.name, "dtype": self.model.architecture.dtype}
        point = self.at(request)
        return plan_point(
            point, self.budget_bytes, self.host_budget_bytes, identity=identity,
            longest=self.max_context(request, solver=solver) if limit else None, solver=solver,
            config=None if config is None else point.config(config),
        )  # fmt: skip

    def max_context(self, request: Request, *, solver: str = "auto") -> int:
        """Largest context for requests like this one, in tokens, at which a plan fits; 0 if not even one token fits.

        Solved once for all requests that differ in their context alone.
        """
        window = max(request.seq_lens) if request.phase.cached else None
        kind = (solver, request.kind, request.mask_ratio, request.masked, request.logit_rows, window)
        key = (*kind, self.budget_bytes, self.host_budget_bytes, *self.pinned.items())
        if key not in self._longest:
            self._longest[key] = max_context(
                self.space(request.kind), self._dims_at(request), self.budget_bytes, limit=MAX_TOKENS,
                host_budget_bytes=self.host_budget_bytes, pinned=self.pinned, solver=solver,
            )  # fmt: skip
        return self._longest[key]

    def needed(self, request: Request) -> int:
        """Bytes of the smallest budget that holds the request."""
        return smallest_total(self.at(request), self.host_budget_bytes)[0]


def read_budgets(device: Device, budget: Size | None, host_budget: Size | None) -> tuple[int, int]:
    """Bytes of the device and of the host that may be used: as asked for, or what the profile says."""
    return (
        device.memory_bytes if budget is None else parse_bytes(budget, what="budget"),
        device.host_bytes if host_budget is None else parse_bytes(host_budget, what="host_budget", least=0),
    )


def plan_point(
    point: Point,
    budget_bytes: int,
    host_budget_bytes: int = 0,
    *,
    identity: Mapping[str, Any],
    longest: int | None = None,
    solver: str = "auto",
    config: Config | None = None,
) -> Plan:
    """Search, place, assemble and prove at fixed dims.

    Parameters
    ----------
    identity
        The model's name, and the dtype that it is said to be in; that of most weights, if not given.
    longest
        The largest context, for `max_ctx_tokens`; without it that is the context itself, or 0.
    config
        A configuration to take instead of searching.

    Raises
    ------
    UnsafePlan
        If the checker refuses what was planned: nothing is handed out.
    """
    if config is None:
        result, (offsets, peak, used) = search_and_place(point, budget_bytes, host_budget_bytes, solver=solver)
    else:
        result = SearchResult(config=config, fits=True, seconds=point.seconds(config), evaluations=0, trace=())
        offsets, peak, used = place(point, config, solver=solver)
    fits = (
        point.total_bytes(result.config, peak) <= budget_bytes
        and point.host_bytes(result.config.choices) <= host_budget_bytes
    )
    context = point.dims.get("keys", point.dims.get("tokens", 0)) if fits else 0
    if longest is None or point.dims.get("seqs") == 1:  # a configuration of one's own may fit where the search's do not
        longest = max(longest or 0, context)
    body = point.space.template.bodies[result.config.choices]
    draft = assemble(
        point, result, offsets, peak, budget_bytes=budget_bytes,
        identity={"mosaic_version": __version__, "dtype": body.dtype, **identity},
        host_budget_bytes=host_budget_bytes, max_ctx_tokens=longest, solver=used,
    )  # fmt: skip
    _require_safe(draft)
    return Plan(draft)


def _require_safe(draft: Draft) -> None:
    """Prove a plan before anybody gets it: whatever searched and packed, the checker shares no code with it."""
    violations = prove_safe(draft.records, draft.header, draft.numbers)
    if violations:
        dims = ", ".join(f"{name}={value:,}" for name, value in draft.header["dims"].items())
        what = f"{draft.header['model']} ({dims})"
        raise UnsafePlan(map(str, violations), what=what, solver=draft.header["solver"])


def plan(
    model: Model | str | Path,
    *,
    tokens: Size | None = None,
    seq_lens: Iterable[Size] | str | None = None,
    masked: Size | None = None,
    mask_ratio: float | None = None,
    device: Device | str | None = None,
    budget: Size | None = None,
    host_budget: Size | None = None,
    solver: str = "auto",
) -> Plan:
    """Plan one denoising step to the byte.

    Parameters
    ----------
    model
        A preset's name, a checkpoint directory, a config.json, or a `Model`.
    tokens
        Context of one sequence: a number or like "128k"; or `seq_lens` for a packed batch.
    masked, mask_ratio
        Rows to unembed, as a number or as a share of the tokens (half of them if neither is given).
    device, budget
        Profile by name or object (the built-in rtx-4090 if not given), and what may be used of it: bytes, or like "24GiB".
    host_budget
        Pinned host memory that weights and hidden states may be kept in; what the profile says by default.
    solver
        Offset solver; `auto` is the portfolio.

    Returns
    -------
    Plan
        With `fits` False where the request does not fit.

    Examples
    --------
    >>> plan("llada-8b", tokens="128k", device="rtx-3090", budget="20GiB").fits
    True
    """
    if (tokens is None) == (seq_lens is None):
        raise UsageError("give either tokens (one sequence) or seq_lens (a packed batch).")
    if masked is not None and mask_ratio is not None:
        raise UsageError("give either masked (rows) or mask_ratio (a share of the tokens), not both.")
    ratio = DEFAULT_MASK_RATIO if mask_ratio is None else mask_ratio
    request = Request(seq_lens=(tokens,) if seq_lens is None else seq_lens, masked=masked, mask_ratio=ratio)  # type: ignore[arg-type]
    return Planner(model, device=device, budget=budget, host_budget=host_budget).plan(request, solver=solver)
