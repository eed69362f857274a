"""The options of `GenerationConfig` on the command line. None is the algorithm's default."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, TypeAlias

import typer

from mosaic.cli.completion import device_names

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
Cache: TypeAlias = Annotated[
    str | None,
    typer.Option(help="LLaDA, Dream (fast-dllm): prefix, dual, or sparse, with options as in sparse:retention=0.1."),
]
PlannedCache: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--cache", help="LLaDA, Dream: plan a Refresh and Reuse of --ctx positions, sparse or sparse:retention=0.1."
    ),
]
SmallBlockLength: TypeAlias = Annotated[int | None, typer.Option(help="Fast-dLLM v2: tokens decoded together.")]
EditThreshold: TypeAlias = Annotated[
    float | None, typer.Option(help="LLaDA2.1: probability above which a token is replaced.")
]
MaxPostSteps: TypeAlias = Annotated[int | None, typer.Option(help="LLaDA2.1: steps after a block's last mask.")]
MinimalTopK: TypeAlias = Annotated[
    int | None, typer.Option(help="LLaDA2.0: at most gen_length / minimal_topk steps a block.")
]
Attention: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="SDAR, LLaDA2.0, Fast-dLLM v2: mage, oracle, sparsed, quest or exact-ends (sparse), flashblock (reuse), or both as "
        "mage+flashblock; options may follow, as in mage:k=1024:every=8; default exact."
    ),
]
Eviction: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="SDAR, LLaDA2.0, Fast-dLLM v2: drop tokens after two layers, focus or focus-public, with options as in "
        "focus:keep=4; default none."
    ),
]
BlockCache: TypeAlias = Annotated[
    str | None,
    typer.Option(help="SDAR, LLaDA2.0, Fast-dLLM v2: leave decided tokens out of a block's later steps, dc or dc+."),
]
BlockCommit: TypeAlias = Annotated[
    str | None, typer.Option(help="With --block-cache: keys of finished blocks, exact (default) or cached.")
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
    """Return the given options that `GenerationConfig` takes, with those of policies parsed.

    Raises
    ------
    UsageError
        If there is no such policy, or one of its options is invalid.
    """
    from mosaic.decoding.config import GenerationConfig
    from mosaic.models.policies.registry import KINDS, options_of

    params = context.params
    found = {entry.name: params[entry.name] for entry in fields(GenerationConfig) if params.get(entry.name) is not None}
    return found | {field: options_of(field, found[field]) for field in KINDS if field in found}
