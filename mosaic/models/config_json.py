"""A config.json: the keys of each family that are read, must have a fixed value or have no effect, and the values read.

No key is ignored silently: a value that would change the mathematics is refused by name, and an unknown key is named in
a `ConfigWarning`. If a checkpoint's own code ignores a key, a value that contradicts the code is refused too: the
config or the code is wrong.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from mosaic.errors import ConfigWarning, UnsupportedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """The allowed values of a key; null is always allowed.

    Parameters
    ----------
    why
        What Mosaic computes instead, or what the key would need: the end of a sentence.
    allowed
        The values that are computed.
    each
        Whether the value is a list whose entries must each be allowed.
    unless
        Another key and the value of it with which this one has no effect.
    """

    why: str
    allowed: tuple[Any, ...] = ()
    each: bool = False
    unless: tuple[str, Any] | None = None

    def holds(self, value: Any, config: Mapping[str, Any]) -> bool:
        """Return whether the value is allowed."""
        if value is None or (self.unless is not None and config.get(self.unless[0]) == self.unless[1]):
            return True
        values = value if self.each and isinstance(value, list) else [value]
        return all(any(_same(entry, right) for right in self.allowed) for entry in values)


def _same(value: Any, right: Any) -> bool:
    """Equality that distinguishes true from 1, but not 1 from 1.0."""
    return isinstance(value, bool) == isinstance(right, bool) and bool(value == right)


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """The keys of a family, or a part of them.

    Parameters
    ----------
    used
        Keys that the family's file reads.
    fixed
        Keys that must be absent, null, or have an allowed value.
    harmless
        Keys without effect on Mosaic's computation: training, generation, bookkeeping.
    """

    used: frozenset[str] = frozenset()
    fixed: Mapping[str, Fixed] = field(default_factory=dict)
    harmless: frozenset[str] = frozenset()

    def extended(self, used: str, *, fixed: Mapping[str, Fixed] | None = None, harmless: str = "") -> Keys:
        """Return this table with more keys, their names separated by spaces; a later entry of a key wins.

        >>> "hidden_size" in COMMON.extended("hidden_size").used
        True
        """
        read, inert = frozenset(used.split()), frozenset(harmless.split())
        more = dict(fixed or {})
        kept = {key: rule for key, rule in self.fixed.items() if key not in read | inert}
        return Keys(
            used=(self.used - inert - set(more)) | read,
            fixed={**kept, **more},
            harmless=(self.harmless - read - set(more)) | inert,
        )

    def check(self, config: Mapping[str, Any], family: str) -> None:
        """Refuse values that would change the mathematics, and warn of unknown keys.

        Raises
        ------
        UnsupportedModel
            Naming the key, its value, and why.
        """
        for key, rule in self.fixed.items():
            if key in config and not rule.holds(config[key], config):
                raise UnsupportedModel(_refusal(key, config[key], rule, family))
        unknown = sorted(str(key) for key in config.keys() - self.used - self.fixed.keys() - self.harmless)
        if unknown:
            names = ", ".join(f"'{key}'" for key in unknown)
            warnings.warn(
                f"config.json: {names} {'is' if len(unknown) == 1 else 'are'} unknown to Mosaic's family '{family}' and "
                f"not used; make sure that the model computes the same without {'it' if len(unknown) == 1 else 'them'}.",
                ConfigWarning,
                stacklevel=2,
            )


def _refusal(key: str, value: Any, rule: Fixed, family: str) -> str:
    allowed = " or ".join(_shown(right) for right in rule.allowed)
    expected = f"{allowed} or absent" if allowed else "absent or null"
    if rule.unless is not None:
        expected += f", or '{rule.unless[0]}' {_shown(rule.unless[1])}"
    return f"config.json: {family} with '{key}' {_shown(value)} is not supported, it must be {expected}: {rule.why}."


def _shown(value: Any) -> str:
    """The value as JSON has it, shortened."""
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


_SLIDING: Final = "every layer sees the whole context"

COMMON: Final = Keys().extended(
    "torch_dtype dtype",
    fixed={
        "hidden_act": Fixed(allowed=("silu", "swish"), why="the feed-forward is silu(gate) * up"),
        "quantization_config": Fixed(allowed=({},), why="weights are read as plain floating-point tensors"),
        "compression_config": Fixed(allowed=({},), why="weights are read as plain floating-point tensors"),
        "use_sliding_window": Fixed(allowed=(False,), why=_SLIDING),
        "sliding_window": Fixed(unless=("use_sliding_window", False), why=_SLIDING),
        "layer_types": Fixed(allowed=("full_attention",), each=True, why=_SLIDING),
        "attention_chunk_size": Fixed(why=_SLIDING),
        "attention_bias": Fixed(allowed=(False,), why="the attention's projections have no bias"),
        "mlp_bias": Fixed(allowed=(False,), why="the feed-forward has no bias"),
        "partial_rotary_factor": Fixed(allowed=(1,), why="all dims of a head are rotated"),
        "use_mrope": Fixed(allowed=(False,), why="positions have one axis"),
        "clip_qkv": Fixed(why="queries, keys and values are not clamped"),
        "attn_logit_softcapping": Fixed(why="attention scores are not capped"),
        "final_logit_softcapping": Fixed(why="logits are not capped"),
        "logit_scale": Fixed(allowed=(1,), why="logits are not scaled"),
        "logits_scaling": Fixed(allowed=(1,), why="logits are not scaled"),
        "embedding_multiplier": Fixed(allowed=(1,), why="embeddings are not scaled"),
        "residual_multiplier": Fixed(allowed=(1,), why="residuals are not scaled"),
        "attention_multiplier": Fixed(why="attention scores are scaled by 1 / sqrt(head size)"),
        "query_pre_attn_scalar": Fixed(why="attention scores are scaled by 1 / sqrt(head size)"),
        "pruned_heads": Fixed(allowed=({},), why="every head is computed"),
        "add_cross_attention": Fixed(allowed=(False,), why="there is no encoder"),
        "is_encoder_decoder": Fixed(allowed=(False,), why="there is no encoder"),
    },
    # what wrote the file, and for whom
    harmless="architectures model_type auto_map transformers_version _name_or_path _commit_hash tokenizer_class torchscript "
    "_attn_implementation attn_implementation _attn_implementation_autoset _attn_implementation_internal "
    # training
    "initializer_range attention_dropout hidden_dropout embedding_dropout output_dropout resid_dropout "
    "residual_dropout gradient_checkpointing pretraining_tp use_bfloat16 tf_legacy_loss finetuning_task "
    "task_specific_params problem_type num_labels id2label label2id output_router_logits router_aux_loss_coef "
    # what a call returns or keeps
    "use_cache return_dict return_dict_in_generate output_hidden_states output_attentions output_scores "
    "chunk_size_feed_forward is_decoder cross_attention_hidden_size tie_encoder_decoder max_window_layers "
    # autoregressive generation, which no decoding algorithm reads
    "bos_token_id sep_token_id decoder_start_token_id forced_bos_token_id forced_eos_token_id prefix max_length "
    "min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p "
    "repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids "
    "num_return_sequences remove_invalid_values exponential_decay_length_penalty suppress_tokens "
    "begin_suppress_tokens",
)
"""The keys of all families: the standard keys of Hugging Face configs, and those of similar models."""


# -- values, one key at a time ------------------------------------------------------------------------------------------

MOST: Final = (1 << 31) - 1
"""The largest supported size; products of smaller sizes are exact integers."""
FLOATS: Final = ("bfloat16", "float16", "float32", "float64")


def refuse(key: str, expected: str, found: object) -> UnsupportedModel:
    """Return an error that names the key, the expected value and the actual one.

    >>> str(refuse("rms_norm_eps", "a number above 0", -1))
    "config.json: 'rms_norm_eps' must be a number above 0, got -1."
    """
    return UnsupportedModel(f"config.json: '{key}' must be {expected}, got {found!r}.")


def positive(config: Mapping[str, Any], *keys: str, default: int | None = None) -> int:
    """Return a size that may have several names, which must agree.

    >>> positive({"d_model": 64}, "d_model"), positive({}, "n_layers", default=2)
    (64, 2)
    """
    found = {key: config[key] for key in keys if config.get(key) is not None}
    for key, value in found.items():
        if type(value) is not int or not 0 < value <= MOST:
            raise refuse(key, "a positive integer", value)
    if len(set(found.values())) > 1:
        said = " and ".join(f"'{key}' is {value}" for key, value in found.items())
        raise UnsupportedModel(f"config.json: {said}, but they mean the same; keep one of them.")
    if found:
        return int(next(iter(found.values())))
    if default is None:
        raise UnsupportedModel(f"config.json has no '{keys[0]}'; Mosaic needs it to plan this family.")
    return default


def count(config: Mapping[str, Any], key: str) -> int:
    """Return a count; null or missing: 0."""
    value = config.get(key)
    if value is None or (type(value) is int and value == 0):
        return 0
    return positive(config, key)


def share(whole: int, parts: int, key: str, parts_key: str) -> int:
    """Return an even share of a size.

    Raises
    ------
    UnsupportedModel
        If it is no integer.
    """
    if whole % parts:
        raise UnsupportedModel(f"config.json: '{key}' is {whole}, which {parts} '{parts_key}' do not divide.")
    return whole // parts


def number(config: Mapping[str, Any], key: str, default: float, *, above: float, most: float) -> float:
    """Return a number in (above, most]; missing or null: the default."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not above < value <= most:
        raise refuse(key, f"a number above {above:g} and at most {most:g}", value)
    return float(value)


def flag(config: Mapping[str, Any], key: str, *, default: bool) -> bool:
    """Return a boolean; missing or null: the default."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise refuse(key, "true or false", value)
    return value


def token_id(config: Mapping[str, Any], key: str, default: int, vocabulary: int) -> int:
    """Return one token's id, checked against the vocabulary; missing or null: the default."""
    value = config.get(key)
    if value is None:
        return default
    if type(value) is not int or not 0 <= value < vocabulary:
        raise refuse(key, f"a token id below {vocabulary}, the size of the vocabulary", value)
    return value


def token_ids(
    config: Mapping[str, Any], key: str, default: tuple[int, ...], vocabulary: int, *also: int
) -> tuple[int, ...]:
    """Return token ids of a config key, one or a list; to a single id, the family's ids `also` are added.

    >>> token_ids({"eos_token_id": 5}, "eos_token_id", (1,), 9, 7), token_ids({"eos_token_id": [2, 3]}, "eos_token_id", (1,), 9)
    ((5, 7), (2, 3))
    """
    value = config.get(key)
    if value is None:
        return tuple(dict.fromkeys((*default, *also)))
    given = value if isinstance(value, list) else [value]
    if not all(type(token) is int and 0 <= token < vocabulary for token in given):
        raise refuse(key, f"a token id below {vocabulary}, the size of the vocabulary, or a list of them", value)
    return tuple(dict.fromkeys(given if isinstance(value, list) else (*given, *also)))


def dtype_of(config: Mapping[str, Any]) -> str:
    """Return the dtype of a checkpoint, by either of its two keys; the default is bfloat16.

    >>> dtype_of({"torch_dtype": "float16"}), dtype_of({"dtype": "torch.float32"})
    ('float16', 'float32')
    """
    found = {key: _float_dtype(key, config[key]) for key in ("torch_dtype", "dtype") if config.get(key) is not None}
    if len(set(found.values())) > 1:
        raise UnsupportedModel(
            f"config.json: 'torch_dtype' is {found['torch_dtype']} and 'dtype' is {found['dtype']}; keep one of them."
        )
    return next(iter(found.values()), "bfloat16")


def _float_dtype(key: str, value: object) -> str:
    """The name of a floating-point dtype that Mosaic computes in."""
    name = str(value).removeprefix("torch.")
    if name not in FLOATS:
        raise refuse(key, f"a floating-point dtype of {', '.join(FLOATS)}", value)
    return name
