"""The options of `GenerationConfig` as commands take them. None, where an option is left out, is the algorithm's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import typer

from mosaic.cli.completion import device_names
from mosaic.errors import UsageError

if TYPE_CHECKING:
    from mosaic.models.policies.policy import Options

__all__ = [
    "Ahead", "Alg", "AlgTemp", "Algorithm", "Alpha", "Attention", "BlockCache", "BlockCommit", "BlockLength",
    "Budget", "Cache", "CfgScale", "DType", "EditThreshold", "Eps", "Eviction", "ExactLayers", "Factor", "K",
    "MaxPostSteps", "MinimalTopK", "Page", "Remasking", "ReuseChange", "ReuseSteps", "RopeScaling",
    "SmallBlockLength", "Steps", "Temperature", "Threads", "Threshold", "TopK", "TopP", "Where", "given",
    "policy_options",
]  # fmt: skip

Steps: TypeAlias = Annotated[
    int | None, typer.Option(help="Denoising steps in all; of each block for block-diffusion models.")
]
BlockLength: TypeAlias = Annotated[int | None, typer.Option(help="Tokens per block.")]
Temperature: TypeAlias = Annotated[float | None, typer.Option(help="0, the default, takes the most likely token.")]
TopP: TypeAlias = Annotated[float | None, typer.Option(help="Sample from the most likely tokens of this probability.")]
TopK: TypeAlias = Annotated[int | None, typer.Option(help="Sample from this many most likely tokens.")]
Remasking: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="LLaDA: low_confidence, random. SDAR: sequential, low_confidence_static, low_confidence_dynamic."
    ),
]
Algorithm: TypeAlias = Annotated[
    str | None, typer.Option(help="llada, dream, fast-dllm, sdar, …; default the family's own.")
]
Alg: TypeAlias = Annotated[str | None, typer.Option(help="Dream: origin, maskgit_plus, topk_margin, entropy.")]
AlgTemp: TypeAlias = Annotated[float | None, typer.Option(help="Dream: randomness of the positions.")]
Threshold: TypeAlias = Annotated[float | None, typer.Option(help="Commit every token whose confidence is above this.")]
Factor: TypeAlias = Annotated[float | None, typer.Option(help="Fast-dLLM: the factor rule instead of a threshold.")]
Cache: TypeAlias = Annotated[str | None, typer.Option(help="Fast-dLLM: prefix or dual.")]
SmallBlockLength: TypeAlias = Annotated[int | None, typer.Option(help="Fast-dLLM v2: tokens decoded together.")]
EditThreshold: TypeAlias = Annotated[
    float | None, typer.Option(help="LLaDA2.1: probability above which a token is replaced.")
]
MaxPostSteps: TypeAlias = Annotated[int | None, typer.Option(help="LLaDA2.1: steps after a block's last mask.")]
MinimalTopK: TypeAlias = Annotated[
    int | None, typer.Option(help="LLaDA2.0: at most gen_length / minimal_topk steps a block.")
]
Ahead: TypeAlias = Annotated[
    bool | None,
    typer.Option(
        help="SDAR, LLaDA2.0: launch a step before the last one's outcome is read, on a guess; not: tokens on the host."
    ),
]
Attention: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="SDAR, LLaDA2.0, Fast-dLLM v2: mage, oracle, sparsed, quest or exact-ends (sparse), flashblock (reuse), or both as "
        "mage+flashblock; options may follow, as in mage:k=1024:every=8; default exact."
    ),
]
K: TypeAlias = Annotated[int | None, typer.Option("--k", help="With --attention: keys that are selected.")]
Page: TypeAlias = Annotated[int | None, typer.Option(help="With --attention: keys that are selected together.")]
ExactLayers: TypeAlias = Annotated[
    int | None, typer.Option(help="With --attention: first layers that attend to all keys.")
]
Eviction: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="SDAR, LLaDA2.0, Fast-dLLM v2: drop tokens after two layers, focus or focus-public, with options as in "
        "focus:keep=4; default none."
    ),
]
Alpha: TypeAlias = Annotated[
    float | None, typer.Option(help="With --eviction: tokens kept for each that is expected to be decided; at least 1.")
]
BlockCache: TypeAlias = Annotated[
    str | None,
    typer.Option(help="SDAR, LLaDA2.0, Fast-dLLM v2: leave decided tokens out of a block's later steps, dc or dc+."),
]
BlockCommit: TypeAlias = Annotated[
    str | None, typer.Option(help="With --block-cache: keys of finished blocks, exact (default) or cached.")
]
ReuseSteps: TypeAlias = Annotated[
    int | None, typer.Option(help="With --attention: steps that an output over the prefix serves, where it is reused.")
]
ReuseChange: TypeAlias = Annotated[
    float | None, typer.Option(help="With --attention: relative change of queries from which on it is not reused.")
]
RopeScaling: TypeAlias = Annotated[
    str | None, typer.Option(help="Reach beyond the trained context: linear, dynamic or yarn, and a factor: yarn:4.")
]
Eps: TypeAlias = Annotated[float | None, typer.Option(help="Dream: the last time.")]
CfgScale: TypeAlias = Annotated[float | None, typer.Option(help="Classifier-free guidance; 0 is off.")]
Budget: TypeAlias = Annotated[str | None, typer.Option(help="Bytes that may be used, such as 24GiB.")]
DType: TypeAlias = Annotated[
    str | None,
    typer.Option(help="Of weights and activations; the checkpoint's, and float32 for the small models on a CPU."),
]
Threads: TypeAlias = Annotated[
    int | None,
    typer.Option(help="On a CPU, threads of an operation; by the model's size, at most as many as PyTorch uses."),
]
BatchInvariant: TypeAlias = Annotated[
    bool, typer.Option("--batch-invariant", help="Kernels whose results do not depend on other requests in a step.")
]
Where: TypeAlias = Annotated[
    str, typer.Option(help="cpu, or the profile of this machine's card.", autocompletion=device_names)
]


def given(context: typer.Context) -> dict[str, Any]:
    """Return those of a command's options that `GenerationConfig` takes and that were given."""
    from mosaic.decoding.config import GenerationConfig

    params = context.params
    found = {entry.name: params[entry.name] for entry in fields(GenerationConfig) if params.get(entry.name) is not None}
    chosen = {field: policy_options(field, params) for field in BESIDE}
    return found | {name: value for name, value in chosen.items() if value is not None}


BESIDE: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "attention": {"flashblock": ("reuse_steps", "reuse_change"), "mage": ("k", "page", "exact_layers")},
    "eviction": {"focus": ("alpha",)},
}
"""What goes with --attention and --eviction, by the names of parameters; and a preset that takes it."""


def policy_options(field: str, params: Mapping[str, Any]) -> Options | None:
    """Return a preset with what is said beside it; None where there is no such policy.

    Raises
    ------
    UsageError
        If there is no such preset, a value cannot be, or one is given without a preset.
    """
    from mosaic.models.policies.registry import options_of

    changed = {name: params[name] for names in BESIDE[field].values() for name in names if params[name] is not None}
    if params[field] is not None:
        found: Options = options_of(field, params[field]).with_options(changed)
        return found
    for preset, names in BESIDE[field].items():
        if changed.keys() & names:
            *others, last = [f"--{name.replace('_', '-')}" for name in names]
            flags = f"{', '.join(others)} and {last} go" if others else f"{last} goes"
            raise UsageError(f"{flags} with --{field}, such as --{field} {preset}.")
    return None
