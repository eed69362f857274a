"""Parse options into a planner and a request; shared by several commands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mosaic.errors import MissingExtra, PlanFormatError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from mosaic.models import Model
    from mosaic.planner import Planner, Request
    from mosaic.planner.plan import Plan


def read_model(model: str | None, dtype: str | None) -> Model:
    """Return the model that `--model` and `--dtype` describe."""
    from mosaic.models import load

    if model is None:
        raise UsageError("give a model: --model llada-8b (see `mosaic models`).")
    loaded = load(model)
    return loaded if dtype is None else loaded.with_dtype(dtype)


def scaled(model: Model, rope_scaling: str | None) -> Model:
    """Return a model with the rotary scaling of `--rope-scaling`."""
    if rope_scaling is None:
        return model
    kind, _, factor = rope_scaling.partition(":")
    try:
        times = float(factor)
    except ValueError:
        raise UsageError(
            f"cannot read the rotary scaling '{rope_scaling}': write a type and a factor, such as yarn:4."
        ) from None
    return model.with_rope_scaling(kind, times)


def read_plan(file: Path) -> Plan:
    """Read a plan file and check it, so that no figure of an invalid plan is shown.

    Raises
    ------
    PlanFormatError
        Naming the file and the first claim that does not hold.
    """
    from mosaic.planner.check import check_plan
    from mosaic.planner.plan import Plan

    plan = Plan.load(file)
    violations = check_plan(plan.document)
    if violations:
        more = f" (and {len(violations) - 1:,} more)" if len(violations) > 1 else ""
        what = " ".join(violations[0].message.split())
        raise PlanFormatError(
            f"{file}: not a valid plan: {what}{more}; `mosaic check` lists everything, or plan again."
        )
    return plan


def own_dtype(model: str, device: str) -> str | None:
    """Return a command's default dtype for a model; None: the checkpoint's.

    The small models run in float32 on a CPU, because 16-bit operands are converted tile by tile, which is slower.
    """
    from mosaic.devices import load_device
    from mosaic.models import SHIPPED

    return "float32" if model in SHIPPED and load_device(device).backend == "cpu" else None


def read_request(
    ctx: str | None, seq_lens: str | None, mask_ratio: float | None, masked: str | None, *, auto: Planner | None = None
) -> Request:
    """Return the request that the options describe; `auto` is the planner that solves `--ctx auto`, if that is allowed.

    If no context fits, `--ctx auto` gives the smallest request, which does not fit.
    """
    from mosaic.planner.request import DEFAULT_MASK_RATIO, Request
    from mosaic.units import parse_lengths, parse_tokens

    if (ctx is None) == (seq_lens is None):
        raise UsageError("give a context (--ctx 128k, --ctx auto) or the lengths of a batch (--seq-lens 4k,32k).")
    if mask_ratio is not None and masked is not None:
        raise UsageError("give either --mask-ratio or --masked, not both.")
    asked: dict[str, Any] = {
        "mask_ratio": DEFAULT_MASK_RATIO if mask_ratio is None else mask_ratio,
        "masked": None if masked is None else parse_tokens(masked),
    }
    if ctx == "auto":
        if auto is None:
            raise UsageError(
                "--ctx auto is for `mosaic plan`, where the device is given; name a context, such as 128k."
            )
        least = asked["masked"] or 1
        longest = auto.max_context(Request(seq_lens=(least,), **asked))
        return Request(seq_lens=(max(longest, least),), **asked)
    lengths = parse_lengths(seq_lens) if seq_lens is not None else (parse_tokens(str(ctx)),)
    return Request(seq_lens=lengths, **asked)


def require_torch(purpose: str) -> None:
    """Name the extra to install, before anything is imported or started."""
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise MissingExtra("torch", "torch", purpose)
