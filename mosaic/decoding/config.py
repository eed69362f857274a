"""`GenerationConfig`: every option of every algorithm, checked where it is made and where it meets a model.

What an algorithm takes, what it is for and its own defaults stand in one table, `ALGORITHMS`.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mosaic.errors import UnknownName, UsageError
from mosaic.models.parts import KEPT, Commit
from mosaic.models.phase import Phase
from mosaic.models.policies.block_cache import BLOCK_CACHES, BLOCK_COMMITS
from mosaic.models.policies.policy import BlockStep, Options
from mosaic.models.policies.registry import KINDS, options_of, policies_of

if TYPE_CHECKING:
    from mosaic.models.architecture import Architecture

__all__ = [
    "ALGORITHMS",
    "GenerationConfig",
    "NamedAlgorithm",
    "Traits",
    "own_algorithm",
    "resolve",
    "uncut",
    "with_options",
]

REMASKING: Final = ("low_confidence", "random", "sequential", "low_confidence_static", "low_confidence_dynamic")
ALGS: Final = ("origin", "maskgit_plus", "topk_margin", "entropy")
FINE_STEPS: Final = 4096
"""Most steps of Dream for fewer tokens than this: each step takes the host a draw or a count."""
_COMMON: Final = frozenset({"algorithm", "gen_length", "temperature", "seed", "stop_at_eos"})
_COMPUTING: Final = frozenset({"eviction", "block_cache", "block_commit"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What an algorithm takes besides the options that all take, and the models that it is for.

    Parameters
    ----------
    options
        Fields of a `GenerationConfig`; any other that is set is refused.
    blockwise
        For models that attend block by block, causally, or for bidirectional ones; None: either.
    shifted
        Whether row i-1 predicts position i; None: either.
    remasking
        The values of that option, the default first.
    defaults
        Values of options that are left out.
    """

    options: frozenset[str] = frozenset()
    blockwise: bool | None = None
    shifted: bool | None = None
    remasking: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedAlgorithm:
    """Name and traits of an algorithm; `Algorithm` adds how it decodes."""

    name: str
    traits: Traits = Traits()

    def __str__(self) -> str:
        return self.name


class Bound(NamedTuple):
    """What a number may be: in words, as `int` or `float`, and in those of JSON Schema."""

    words: str
    kind: type
    limits: Mapping[str, float]

    def holds(self, value: float) -> bool:
        """Whether a value is within it."""
        return all(_WITHIN[name](value, limit) for name, limit in self.limits.items())


_WITHIN: Final = {
    "minimum": operator.ge,
    "exclusiveMinimum": operator.gt,
    "maximum": operator.le,
    "exclusiveMaximum": operator.lt,
}
_COUNT, _SHARE = Bound("at least 1", int, {"minimum": 1}), {"exclusiveMinimum": 0, "maximum": 1}
_NOT_BELOW_0 = Bound("at least 0", float, {"minimum": 0})
BOUNDS: Final[Mapping[str, Bound]] = {
    **dict.fromkeys(("gen_length", "steps", "block_length", "small_block_length", "minimal_topk"), _COUNT),
    "top_k": Bound("at least 0 (0: off)", int, {"minimum": 0}),
    "max_post_steps": Bound("at least 0", int, {"minimum": 0}),
    "seed": Bound("an integer", int, {}),
    **dict.fromkeys(("temperature", "alg_temp", "cfg_scale"), _NOT_BELOW_0),
    **dict.fromkeys(("threshold", "top_p"), Bound("in (0, 1]", float, _SHARE)),
    "edit_threshold": Bound("in [0, 1]", float, {"minimum": 0, "maximum": 1}),
    "eps": Bound("in (0, 1)", float, {"exclusiveMinimum": 0, "exclusiveMaximum": 1}),
    "factor": Bound("above 0", float, {"exclusiveMinimum": 0}),
}
"""Of numbers among the options, in the order in which they are checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """How to generate. None means the algorithm's own default; see `docs/decoding.md`.

    Parameters
    ----------
    algorithm
        "llada", "dream", "fast-dllm", "sdar", "fast-dllm-v2", "llada2" or "llada2.1", or an `Algorithm` of your own; the
        model family's if not given.
    gen_length
        Tokens to generate.
    steps
        Denoising steps: of the whole generation (llada, dream, fast-dllm) or of each block (sdar, llada2).
    block_length
        Tokens that are decoded together before those after them.
    temperature
        Of the tokens' distribution; 0 takes the most likely one.
    remasking
        Which rows are kept: "low_confidence" or "random" (llada, fast-dllm); "sequential", "low_confidence_static" or
        "low_confidence_dynamic" (sdar).
    alg, alg_temp
        Dream's: "origin", "maskgit_plus", "topk_margin" or "entropy", and the temperature of the choice of rows.
    top_p, top_k
        Keep the most likely tokens: `top_p` of probability together, `top_k` tokens; 1 and 0 keep all.
    threshold
        Confidence from which, or above which, a token is committed.
    factor
        Fast-dLLM's factor rule instead of a threshold.
    cfg_scale
        Classifier-free guidance; 0 is off.
    seed
        Of all random draws.
    cache
        "prefix" or "dual": keep keys and values within a block (fast-dllm, llada); "dual" on fast-dllm-v2 keeps those of
        the block while one of its small blocks is decoded. "sparse", or `SparseKeys`, keeps a share of the keys outside the block;
        options may follow, such as "sparse:retention=0.1:selection=uniform" (fast-dllm, llada).
    small_block_length
        Fast-dLLM v2's.
    eps
        Dream's last time.
    minimal_topk
        LLaDA2.0's: no more than gen_length / minimal_topk steps a block.
    edit_threshold, max_post_steps
        LLaDA2.1's: probability above which a token is replaced, and steps after a block's last mask.
    attention
        Sparse attention over kept keys, a `SparseAttention` or a preset's name: "mage", "oracle", "sparsed", "quest",
        "exact-ends"; or what is attended to of a prefix kept for several steps, a `PrefixReuse` or "flashblock"; or both, such as
        "mage+flashblock"; options may follow, such as "mage:k=1024:every=8" (sdar, llada2, fast-dllm-v2). None: exact.
    eviction
        Drops tokens after two layers that are unlikely to be decided: an `Eviction` or a preset's name, "focus" or
        "focus-public" (sdar, llada2, fast-dllm-v2; fast-dllm and llada with cache "dual"). None: all are computed. With it a
        block may take more than `steps`.
    block_cache
        Leaves decided tokens of a block out of its later steps: "dc" one step after they were decided, "dc+" when their right
        neighbour has been decided for a step, too (sdar, llada2, fast-dllm-v2). None: each step computes the whole block.
    block_commit
        With `block_cache`, the keys of a finished block: "exact" are those of its final tokens, "cached" those of each token's
        last computation. The first step of the next block writes them; with "cached" and an eviction of `reach` "step" a step
        of its own does.
    stop_at_eos
        End at the first end-of-sequence token.

    Raises
    ------
    UsageError
        A value that cannot be, in one line.

    Examples
    --------
    >>> GenerationConfig(gen_length=64, block_length=32).gen_length
    64
    """

    algorithm: str | NamedAlgorithm | None = None
    gen_length: int = 128
    steps: int | None = None
    block_length: int | None = None
    temperature: float = 0.0
    remasking: str | None = None
    alg: str | None = None
    alg_temp: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    threshold: float | None = None
    factor: float | None = None
    cfg_scale: float = 0.0
    seed: int = 0
    cache: str | Options | None = None
    small_block_length: int | None = None
    eps: float = 1e-3
    minimal_topk: int = 1
    edit_threshold: float = 0.9
    max_post_steps: int = 16
    attention: str | Options | None = None
    eviction: str | Options | None = None
    block_cache: str | None = None
    block_commit: str | None = None
    stop_at_eos: bool = True

    def __post_init__(self) -> None:
        for entry in fields(self):
            if getattr(self, entry.name) is None:
                object.__setattr__(self, entry.name, entry.default)
        for what, known in CHOICES.items():
            value = getattr(self, what)
            own = what == "algorithm" and isinstance(value, NamedAlgorithm)
            if value is not None and not isinstance(value, str) and not own:
                raise UsageError(f"{what}: expected a name, one of {', '.join(known)}, got {value!r}.")
            if isinstance(value, str) and value not in known:
                raise UnknownName(what, value, known)
        if not isinstance(self.stop_at_eos, bool):
            raise UsageError(f"stop_at_eos: expected True or False, got {self.stop_at_eos!r}.")
        for name in KINDS:
            if getattr(self, name) is not None:
                options_of(name, getattr(self, name))
        for name, bound in BOUNDS.items():
            self._check(name, bound)
        if self.threshold is not None and self.factor is not None:
            raise UsageError(f"threshold {self.threshold} and factor {self.factor}: give one of the two.")

    def _check(self, name: str, bound: Bound) -> None:
        value = getattr(self, name)
        if value is None:
            return
        number = isinstance(value, int if bound.kind is int else int | float) and not isinstance(value, bool)
        if not number or (bound.kind is float and not abs(value) <= sys.float_info.max):
            raise UsageError(f"{name}: expected {'an integer' if bound.kind is int else 'a number'}, got {value!r}.")
        if not bound.holds(value):
            raise UsageError(f"{name} is {value}; it must be {bound.words}.")


ALGORITHMS: Final[Mapping[str, Traits]] = {
    "llada": Traits(
        options=frozenset({"steps", "block_length", "remasking", "cfg_scale", "cache", "eviction"}),
        blockwise=False,
        remasking=("low_confidence", "random"),
    ),
    "dream": Traits(
        options=frozenset({"steps", "alg", "alg_temp", "top_p", "top_k", "eps"}),
        blockwise=False,
        defaults={"steps": 512, "alg": "origin"},
    ),
    "fast-dllm": Traits(
        options=frozenset({"block_length", "threshold", "factor", "cache", "top_p", "top_k", "eviction"}),
        blockwise=False,
    ),
    "sdar": Traits(
        options=frozenset({"steps", "block_length", "remasking", "threshold", "top_p", "top_k", "attention"})
        | _COMPUTING,
        blockwise=True,
        shifted=False,
        remasking=("low_confidence_dynamic", "low_confidence_static", "sequential"),
        defaults={"threshold": 0.85},
    ),
    "fast-dllm-v2": Traits(
        options=frozenset(
            {
                "block_length",
                "small_block_length",
                "threshold",
                "cache",
                "top_p",
                "attention",
                "eviction",
                "block_cache",
            }
        ),
        blockwise=True,
        shifted=True,
        defaults={"threshold": 0.95, "top_p": 0.95},
    ),
    "llada2": Traits(
        options=frozenset({"steps", "block_length", "threshold", "minimal_topk", "top_p", "top_k", "attention"})
        | _COMPUTING,
        blockwise=True,
        shifted=False,
        defaults={"threshold": 0.95},
    ),
    "llada2.1": Traits(
        options=frozenset({"block_length", "threshold", "edit_threshold", "max_post_steps", "top_p", "top_k"}),
        blockwise=True,
        shifted=False,
        defaults={"threshold": 0.95},
    ),
}


CHOICES: Final[Mapping[str, Collection[str]]] = {
    "algorithm": ALGORITHMS,
    "remasking": REMASKING,
    "alg": ALGS,
    "block_cache": BLOCK_CACHES,
    "block_commit": BLOCK_COMMITS,
}
"""The names that an option may have."""


def own_algorithm(architecture: Architecture) -> str:
    """Name the algorithm that a family was published with."""
    if architecture.published:
        return architecture.published
    if not architecture.block:
        return "dream" if architecture.shifted else "llada"
    return "fast-dllm-v2" if architecture.shifted else "sdar"


def with_options(config: GenerationConfig | None, options: Mapping[str, Any]) -> GenerationConfig:
    """Return a config with options by name, which come before its own.

    Raises
    ------
    UsageError
        If there is no such option, or a value cannot be.
    """
    if config is not None and not isinstance(config, GenerationConfig):
        raise UsageError(
            f"config: expected GenerationConfig(…) or options by name, such as gen_length=64, got {type(config).__name__}."
        )
    known = [entry.name for entry in fields(GenerationConfig)]
    for name in options:
        if name not in known:
            raise UnknownName("option of generate", name, known)
    return replace(config or GenerationConfig(), **options)


@lru_cache(maxsize=256)
def resolve(config: GenerationConfig, architecture: Architecture) -> GenerationConfig:
    """Fill in what was left to the algorithm, and check what depends on the model.

    Returns
    -------
    GenerationConfig
        With every option that its algorithm takes set.

    Raises
    ------
    UsageError
        If the options do not fit each other, the algorithm or the model.
    """
    chosen = config.algorithm or own_algorithm(architecture)
    name, shipped = str(chosen), not isinstance(chosen, NamedAlgorithm)
    traits = chosen.traits if isinstance(chosen, NamedAlgorithm) else ALGORITHMS[chosen]
    _check_model(name, traits, architecture)
    for option in KINDS:
        if getattr(config, option) is not None:
            options = options_of(option, getattr(config, option))
            if not isinstance(options, Options):
                continue
            options.check(architecture, dual=config.cache == "dual")
            block = config.block_length or architecture.block or config.gen_length
            fitting: dict[str, Any] = {option: options.within_block(block)}
            config = replace(config, **fitting)
    if config.top_k is not None and config.top_k >= architecture.vocabulary:
        config = replace(config, top_k=0)
    for entry in fields(config):
        taken = entry.name in traits.options or entry.name in _COMMON
        if not taken and getattr(config, entry.name) != entry.default:
            raise UsageError(
                f"{entry.name} means nothing to the algorithm '{name}', which takes "
                f"{', '.join(sorted(traits.options)) or 'what all take'}."
            )
    values: dict[str, Any] = {"algorithm": chosen, "top_p": 1.0, "top_k": 0, **traits.defaults}
    if traits.remasking:
        values["remasking"] = traits.remasking[0]
        if config.remasking and config.remasking not in traits.remasking:
            raise UnknownName(f"remasking of '{name}'", config.remasking, traits.remasking)
    values |= _lengths(name, config, architecture) if shipped else {}
    if chosen == "fast-dllm" and config.factor is None:
        values["threshold"] = 0.9
    given = {entry.name: getattr(config, entry.name) for entry in fields(config)}
    values |= {option: value for option, value in given.items() if value is not None}
    found = replace(config, **{option: values[option] for option in values if option in traits.options | _COMMON})
    if shipped:  # an algorithm of a user's own checks what it makes of options, in `shapes`
        (_check_blocks if traits.blockwise else _check_canvas)(found, architecture)
    _check_policies(found, architecture)
    if "block_commit" in traits.options and found.block_cache is not None and found.block_commit is None:
        found = replace(found, block_commit=BLOCK_COMMITS[0])
    if chosen == "llada2" and found.steps is not None:
        found = replace(found, steps=max(min(found.steps, found.gen_length // found.minimal_topk), 1))
    return found


def _check_policies(config: GenerationConfig, architecture: Architecture) -> None:
    """Let the policies make the phase of a first step: those that do not go together refuse."""
    phase = Phase(cache=KEPT, commit=Commit(score="confidence", rule="top"))
    step = BlockStep(start=0, end=0, number=0, steps=1, window=(0, 0))
    for policy in policies_of(config, architecture):
        phase = policy.phase(phase, step)


def uncut(config: GenerationConfig) -> GenerationConfig:
    """Return the same options without eviction and block cache."""
    return replace(config, eviction=None, block_cache=None, block_commit=None)


def _check_model(name: str, traits: Traits, architecture: Architecture) -> None:
    kind = f"attends in blocks of {architecture.block}" if architecture.block else "attends in both directions"
    fits = traits.blockwise in (None, bool(architecture.block))
    if not fits or traits.shifted not in (None, architecture.shifted):
        shift = ", and its row i-1 predicts position i" if architecture.shifted else ""
        raise UsageError(
            f"the algorithm '{name}' is not for this model, which {kind}{shift}; use '{own_algorithm(architecture)}'."
        )


def _lengths(name: str, config: GenerationConfig, architecture: Architecture) -> dict[str, Any]:
    """Default lengths and steps, which depend on others."""
    if name == "llada":
        return {"block_length": _own_block(config, architecture), "steps": config.gen_length}
    if name == "fast-dllm":
        return {"block_length": config.gen_length if config.gen_length % 32 else 32}
    if name == "dream":
        return {}
    block = architecture.block
    small = block if config.eviction is not None else math.gcd(block, 8)
    return {"block_length": block, "steps": config.block_length or block, "small_block_length": small}


def _own_block(config: GenerationConfig, architecture: Architecture) -> int:
    """The longest block, at most the checkpoint's, that divides gen_length, with a number of blocks that divides the steps."""
    fitting = (
        block
        for block in range(min(architecture.decode_block, config.gen_length), 0, -1)
        if config.gen_length % block == 0 and (config.steps or config.gen_length) % (config.gen_length // block) == 0
    )
    return next(fitting, config.gen_length)


def _check_canvas(config: GenerationConfig, architecture: Architecture) -> None:
    """Check what concerns bidirectional models."""
    if config.block_length is not None:
        if config.gen_length % config.block_length:
            raise UsageError(
                f"gen_length {config.gen_length} is not divisible by block_length {config.block_length}; "
                f"use gen_length {-(-config.gen_length // config.block_length) * config.block_length}."
            )
        blocks = config.gen_length // config.block_length
        if config.steps is not None and config.steps % blocks:
            raise UsageError(
                f"steps {config.steps} is not divisible by the {blocks} blocks of {config.block_length} in gen_length "
                f"{config.gen_length}; use steps {-(-config.steps // blocks) * blocks}."
            )
    most = max(FINE_STEPS, config.gen_length)
    if config.algorithm == "dream" and config.steps is not None and config.steps > most:
        raise UsageError(
            f"steps is {config.steps} for {config.gen_length} tokens, so nearly every step would decide none; use at most {most}."
        )
    if config.cache and config.cfg_scale:
        raise UsageError(f"cfg_scale {config.cfg_scale} needs whole sequences; leave out cache '{config.cache}'.")
    if config.algorithm == "fast-dllm" and not architecture.shifted and (config.top_p, config.top_k) != (1.0, 0):
        given = [
            f"{name} {value}"
            for name, value, off in (("top_p", config.top_p, 1.0), ("top_k", config.top_k, 0))
            if value != off
        ]
        raise UsageError(f"fast-dllm on LLaDA samples from all tokens; leave out {' and '.join(given)}.")


def _check_blocks(config: GenerationConfig, architecture: Architecture) -> None:
    """Check what concerns block-diffusion models."""
    if config.block_length != architecture.block:
        raise UsageError(
            f"block_length is {config.block_length}, but this model attends in blocks of {architecture.block}; "
            "leave block_length out."
        )
    if config.block_commit is not None and config.block_cache is None:
        raise UsageError(
            f"block_commit '{config.block_commit}' is about tokens that a block cache has frozen; give block_cache 'dc' or 'dc+'."
        )
    if config.cache == "prefix":
        raise UsageError("cache 'prefix': what precedes the block is always cached on this model; leave cache out.")
    if config.steps is not None and config.steps > config.block_length:
        raise UsageError(
            f"steps is {config.steps} for a block of {config.block_length} tokens; every step decides at least one: "
            f"use steps {config.block_length} or fewer."
        )
    if config.small_block_length is not None and config.block_length % config.small_block_length:
        raise UsageError(
            f"block_length {config.block_length} is not divisible by small_block_length {config.small_block_length}."
        )
