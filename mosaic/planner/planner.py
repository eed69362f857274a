"""From a model and a request to a plan: search, place, assemble.

`plan` is the one-call form. A `Planner` keeps what is compiled, so that further
requests cost milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Any, Final

from mosaic.devices import DEFAULT_DEVICE, Device, load_device
from mosaic.errors import UsageError
from mosaic.models import Model, load
from mosaic.models.safetensors import Layout
from mosaic.planner.cache import template_of
from mosaic.planner.document import assemble
from mosaic.planner.limits import DimsAt, max_context, smallest_total
from mosaic.planner.placement import place
from mosaic.planner.plan import Plan
from mosaic.planner.search import SearchResult, search
from mosaic.planner.space import Config, Point, Space
from mosaic.version import __version__

__all__ = ["DEFAULT_MASK_RATIO", "Planner", "Request", "plan", "plan_point"]

DEFAULT_MASK_RATIO: Final = 0.5
MAX_TOKENS: Final = 2**31 - 1
"""Positions and sequence bounds are int32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One step to plan.

    Parameters
    ----------
    seq_lens
        Lengths of the packed sequences, in tokens.
    masked
        Rows to unembed; None for `mask_ratio` of the tokens, rounded up.
    mask_ratio
        Share of masked tokens, in (0, 1].
    logit_rows
        Rows whose logits are returned as well; 0 for statistics only.
    """

    seq_lens: tuple[int, ...]
    masked: int | None = None
    mask_ratio: float = DEFAULT_MASK_RATIO
    logit_rows: int = 0

    def __post_init__(self) -> None:
        for name, value in (
            ("masked", self.masked),
            ("logit_rows", self.logit_rows),
            *(("a context", n) for n in self.seq_lens),
        ):
            if value is not None and type(value) is not int:
                raise UsageError(f"{name} must be an integer, got {value!r}.")
        for length in self.seq_lens:
            if length < 1:
                raise UsageError(f"a context must be at least 1 token, got {length:,}.")
        if not self.seq_lens:
            raise UsageError("a request needs at least one sequence.")
        if self.tokens > MAX_TOKENS:
            raise UsageError(f"at most {MAX_TOKENS:,} tokens (positions are 32-bit), got {self.tokens:,}.")
        if self.masked is None and not 0 < self.mask_ratio <= 1:
            raise UsageError(f"the mask ratio must be in (0, 1], got {self.mask_ratio}.")
        if self.masked is not None and not 1 <= self.masked <= self.tokens:
            raise UsageError(f"masked rows must be between 1 and the {self.tokens:,} tokens, got {self.masked:,}.")
        if not 0 <= self.logit_rows <= self.tokens:
            raise UsageError(f"logit rows must be between 0 and the {self.tokens:,} tokens, got {self.logit_rows:,}.")

    @property
    def tokens(self) -> int:
        """Packed total of all sequences."""
        return sum(self.seq_lens)

    def dims(self) -> dict[str, int]:
        """Values of the symbolic dims: tokens, seqs, span, masked, and logit_rows where asked for."""
        pairs = sum(length * length for length in self.seq_lens)
        return self._dims(self.tokens, len(self.seq_lens), -(-pairs // self.tokens))

    def dims_at(self, context: int) -> dict[str, int]:
        """The dims of one sequence of another length, the mask ratio (or the masked rows) kept."""
        return self._dims(context, 1, context)

    def _dims(self, tokens: int, seqs: int, span: int) -> dict[str, int]:
        share = ceil(Fraction(str(self.mask_ratio)) * tokens)
        masked = min(self.masked, tokens) if self.masked is not None else max(1, share)
        dims = {"tokens": tokens, "seqs": seqs, "span": span, "masked": masked}
        if self.logit_rows:
            dims["logit_rows"] = min(self.logit_rows, tokens)
        return dims


class Planner:
    """Plans requests for one model on one device.

    Parameters
    ----------
    model
        A `Model`, a preset's name, or a checkpoint directory.
    device
        A `Device` or its name.
    budget_bytes
        What the process may take on the device; its whole memory by default.
    host_budget_bytes
        Pinned host memory that weights and hidden states may take; what the device's profile says by default.
    pinned
        Choices that are not free, such as {"stream": "all"}.

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
        device: Device | str = DEFAULT_DEVICE,
        budget_bytes: int | None = None,
        host_budget_bytes: int | None = None,
        pinned: Mapping[str, str] | None = None,
    ) -> None:
        self.model = model if isinstance(model, Model) else load(model)
        self.device = device if isinstance(device, Device) else load_device(device)
        self.budget_bytes = self.device.memory_bytes if budget_bytes is None else budget_bytes
        if type(self.budget_bytes) is not int or self.budget_bytes < 1:
            raise UsageError(f"a budget is a positive number of bytes (an int), got {budget_bytes!r}.")
        self.host_budget_bytes = self.device.host_bytes if host_budget_bytes is None else host_budget_bytes
        if type(self.host_budget_bytes) is not int or self.host_budget_bytes < 0:
            raise UsageError(f"a host budget is a number of bytes (an int) from 0, got {host_budget_bytes!r}.")
        self.pinned = dict(pinned or {})
        self._spaces: dict[bool, Space] = {}

    def with_pinned(self, pinned: Mapping[str, str]) -> Planner:
        """The same planner with more choices pinned; what it has compiled is shared."""
        other = copy(self)
        other.pinned = {**self.pinned, **pinned}
        return other

    def with_host_budget(self, host_budget_bytes: int) -> Planner:
        """The same planner with another budget of pinned host memory; what it has compiled is shared."""
        other = copy(self)
        other.host_budget_bytes = host_budget_bytes
        return other

    def space(self, *, logits: bool = False) -> Space:
        """The configurations of the step, with or without returned logits."""
        if logits not in self._spaces:
            template = template_of(self.model, backend=self.device.backend, logits=logits)
            self._spaces[logits] = Space(template, self.device)
        return self._spaces[logits]

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
        Layout(self.model.path).verify(weights)

    def plan(
        self, request: Request, *, solver: str = "auto", config: Mapping[str, int | str | None] | None = None
    ) -> Plan:
        """Plan one request; a plan that does not fit says so, it is not an error.

        Parameters
        ----------
        config
            Take this configuration instead of searching: rows per chunk by knob, an option by choice. What is not named
            is off, or the first option. For ablations and tests; the search finds better ones.
        """
        space = self.space(logits=bool(request.logit_rows))
        identity = {"model": self.model.name, "dtype": self.model.architecture.dtype}
        point = space.at(request.dims(), pinned=self.pinned)
        return plan_point(
            point, self.budget_bytes, self.host_budget_bytes, identity=identity, dims_at=request.dims_at, solver=solver,
            config=None if config is None else point.config(config), pinned=self.pinned,
        )  # fmt: skip

    def max_context(self, request: Request) -> int:
        """Largest context for requests like this one, in tokens; 0 if not even one token fits."""
        return max_context(
            self.space(logits=bool(request.logit_rows)), request.dims_at, self.budget_bytes, limit=MAX_TOKENS,
            host_budget_bytes=self.host_budget_bytes, pinned=self.pinned,
        )  # fmt: skip

    def needed(self, request: Request) -> int:
        """Bytes of the smallest budget that holds the request."""
        point = self.space(logits=bool(request.logit_rows)).at(request.dims(), pinned=self.pinned)
        return smallest_total(point, self.host_budget_bytes)[0]


def plan_point(
    point: Point,
    budget_bytes: int,
    host_budget_bytes: int = 0,
    *,
    identity: Mapping[str, Any],
    dims_at: DimsAt | None = None,
    solver: str = "auto",
    config: Config | None = None,
    pinned: Mapping[str, str] | None = None,
) -> Plan:
    """Search, place and assemble at fixed dims.

    Parameters
    ----------
    dims_at
        Dims at another context, to solve `max_ctx_tokens`; without it that is the context itself, or 0.
    config
        A configuration to take instead of searching.
    """
    if config is None:
        result, offsets, peak, used = _search_and_place(point, budget_bytes, host_budget_bytes, solver)
    else:
        result = SearchResult(config=config, fits=True, seconds=point.seconds(config), evaluations=0, trace=())
        offsets, peak, used = place(point, config, solver=solver)
    fits = (
        point.total_bytes(result.config, peak) <= budget_bytes
        and point.host_bytes(result.config.choices) <= host_budget_bytes
    )
    if dims_at is not None:
        longest = max_context(
            point.space, dims_at, budget_bytes, limit=MAX_TOKENS, host_budget_bytes=host_budget_bytes, pinned=pinned
        )
    else:
        longest = point.dims.get("tokens", 0) if fits else 0
    return Plan(
        assemble(
            point, result, offsets, peak, identity={"mosaic_version": __version__, **identity}, budget_bytes=budget_bytes,
            host_budget_bytes=host_budget_bytes, max_ctx_tokens=longest, solver=used,
        )
    )  # fmt: skip


def _search_and_place(
    point: Point, budget_bytes: int, host_budget_bytes: int, solver: str
) -> tuple[SearchResult, Sequence[int], int, str]:
    """Search with the lower bound; where the packing misses it and overruns the budget, search below by the excess."""
    allowance = budget_bytes
    while True:
        result = search(point, allowance, host_budget_bytes)
        offsets, peak, used = place(point, result.config, solver=solver)
        excess = point.total_bytes(result.config, peak) - budget_bytes
        if not result.fits or excess <= 0:
            return result, offsets, peak, used
        allowance -= excess


def plan(
    model: Model | str | Path,
    *,
    tokens: int | None = None,
    seq_lens: Sequence[int] | None = None,
    masked: int | None = None,
    mask_ratio: float | None = None,
    device: Device | str = DEFAULT_DEVICE,
    budget_bytes: int | None = None,
    host_budget_bytes: int | None = None,
    solver: str = "auto",
) -> Plan:
    """Plan one denoising step to the byte.

    Parameters
    ----------
    model
        A preset's name, a checkpoint directory, a config.json, or a `Model`.
    tokens
        Context of one sequence, in tokens; or `seq_lens` for a packed batch.
    masked, mask_ratio
        Rows to unembed, as a number or as a share of the tokens (half of them if neither is given).
    device, budget_bytes
        Profile by name or object, and the bytes that may be used of it.
    host_budget_bytes
        Pinned host memory that weights and hidden states may be kept in; what the profile says by default.
    solver
        Offset solver; `auto` is the portfolio.

    Returns
    -------
    Plan
        With `fits` False where the request does not fit.

    Examples
    --------
    >>> plan("llada-8b", tokens=131072, device="rtx-3090").fits
    True
    """
    if (tokens is None) == (seq_lens is None):
        raise UsageError("give either tokens (one sequence) or seq_lens (a packed batch).")
    if masked is not None and mask_ratio is not None:
        raise UsageError("give either masked (rows) or mask_ratio (a share of the tokens), not both.")
    lengths = tuple(seq_lens) if seq_lens is not None else (tokens,)
    ratio = DEFAULT_MASK_RATIO if mask_ratio is None else mask_ratio
    request = Request(seq_lens=lengths, masked=masked, mask_ratio=ratio)  # type: ignore[arg-type]
    return Planner(model, device=device, budget_bytes=budget_bytes, host_budget_bytes=host_budget_bytes).plan(
        request, solver=solver
    )
