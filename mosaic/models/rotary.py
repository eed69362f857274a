"""Rotary frequencies of a config.json: the base, and the scaling to contexts beyond the trained one.

Sources: linear, kaiokendev 2023; dynamic NTK, emozilla 2023; YaRN, Peng et al. 2023, arXiv 2309.00071; llama3, the
scaling of Llama 3.1. `runtime/frequencies.py` computes them; plans name them by `Rotary.constant`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, Self, TypeAlias, get_args

from mosaic.errors import UnsupportedModel, UsageError
from mosaic.models.config_json import flag, number, positive, refuse

Scaling: TypeAlias = Literal["default", "linear", "dynamic", "yarn", "llama3"]

_PREFIX: Final = "=inv_freq:"
_KEYS: Final[Mapping[str, frozenset[str]]] = {
    kind: frozenset(("rope_type", "type", "rope_theta", "partial_rotary_factor", *more.split()))
    for kind, more in {
        "default": "",
        "linear": "factor",
        "dynamic": "factor original_max_position_embeddings",
        "yarn": "factor original_max_position_embeddings attention_factor beta_fast beta_slow mscale mscale_all_dim truncate",
        "llama3": "factor original_max_position_embeddings low_freq_factor high_freq_factor",
    }.items()
}
"""Keys of `rope_scaling` or `rope_parameters` by type of scaling."""
_HUGE: Final = 1e30


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """The frequencies of one model: 1 / theta^(2i/dim) for the pairs i of rotated dims, changed by the scaling.

    Parameters
    ----------
    theta, dim
        The base, and the rotated dims of a head.
    kind
        `default`: unchanged. `linear` divides all by `factor`. `dynamic` (NTK) raises the base with the sequence's
        length L beyond `original`, by (factor * L / original - (factor - 1))^(dim / (dim - 2)). `yarn` divides by
        `factor` those that make fewer than `slow` turns in `original` positions, none that make more than `fast`, and
        the others in part. `llama3` does so by wavelengths, `original` over `slow` and over `fast`.
    factor
        Multiple of the trained context, at least 1.
    original
        Positions that the model was trained on.
    fast, slow
        Where the ramp starts and ends, in turns.
    truncate
        Round the ramp's ends outwards to whole dims (yarn).
    """

    theta: float
    dim: int
    kind: Scaling = "default"
    factor: float = 1.0
    original: int = 0
    fast: float = 0.0
    slow: float = 0.0
    truncate: bool = True

    @property
    def constant(self) -> str:
        """The name of these frequencies in plans; `dynamic` ones depend on a sequence's length and are no constant.

        >>> Rotary(theta=10000.0, dim=64).constant
        '=inv_freq:theta=10000.0,dim=64'
        """
        defaults = Rotary(theta=self.theta, dim=self.dim)
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        said = {name: v for name, v in values.items() if name in ("theta", "dim") or v != getattr(defaults, name)}
        return _PREFIX + ",".join(f"{name}={value}" for name, value in said.items())

    def check_kept(self, keys: int, length: int) -> None:
        """Refuse kept keys beyond the trained positions if frequencies depend on a length that was not given: keys are
        kept rotated.

        Parameters
        ----------
        keys, length
            Keys that a step sees, and the final length of its sequence; 0 if unknown.

        Raises
        ------
        UsageError
            Naming the scaling and both.
        """
        if self.kind == "dynamic" and keys > max(length, self.original):
            raise UsageError(
                f"a cached step over {keys:,} keys with rope_scaling of type 'dynamic', of a sequence whose final_length is "
                f"{length:,}: beyond {self.original:,} positions frequencies go by the final length, and kept keys are rotated "
                "already. Give every step of the sequence the same final_length."
            )

    @classmethod
    def parse(cls, constant: str) -> Self | None:
        """Read what `constant` wrote; None for any other text.

        >>> Rotary.parse("=inv_freq:theta=10000.0,dim=64,kind=linear,factor=2.0").factor
        2.0
        >>> Rotary.parse("=ones") is None
        True
        """
        pairs = [part.partition("=") for part in constant.removeprefix(_PREFIX).split(",")]
        kinds = {entry.name: entry.type for entry in fields(cls)}
        try:
            found = cls(**{name: _READERS[str(kinds[name])](value) for name, _, value in pairs})
        except (KeyError, TypeError, ValueError):
            return None
        return found if found.constant == constant else None


_READERS: Final[Mapping[str, Any]] = {
    "float": float,
    "int": int,
    "bool": lambda text: {"True": True, "False": False}[text],
    "Scaling": lambda text: {kind: kind for kind in get_args(Scaling)}[text],
}


def read_rotary(
    config: Mapping[str, Any], head_size: int, positions: int, *, theta: float, share: float = 1.0
) -> tuple[Rotary, float]:
    """Read `rope_theta` and `rope_scaling`, or `rope_parameters`, its name in transformers 5.

    Parameters
    ----------
    config
        The config.json.
    head_size, positions
        Of the model: the positions that it was trained for.
    theta, share
        The family's defaults of the base and of the share of a head's dims that are rotated.

    Returns
    -------
    Rotary
        The frequencies.
    float
        The factor on cosines and sines: YaRN's attention factor, else 1.

    Raises
    ------
    UnsupportedModel
        If the scaling is unknown or a value is invalid; the message names it.
    """
    where, given = _scaling(config)
    kind = given.get("rope_type", given.get("type")) or "default"
    if not isinstance(kind, str) or kind not in _KEYS:
        raise UnsupportedModel(f"config.json: '{where}' of type {kind!r} is not supported; known: {', '.join(_KEYS)}.")
    unknown = sorted(map(str, given.keys() - _KEYS[kind]))
    if unknown:
        raise UnsupportedModel(f"config.json: '{where}' of type '{kind}' has no '{unknown[0]}'; remove it.")
    merged = {key: config[key] for key in ("rope_theta", "partial_rotary_factor") if config.get(key) is not None} | {
        key: value for key, value in given.items() if value is not None
    }
    base = number(merged, "rope_theta", theta, above=1, most=_HUGE)
    part = number(merged, "partial_rotary_factor", share, above=0, most=1)
    if share == 1 != part:
        raise refuse("partial_rotary_factor", "1 or absent, as all dims of a head are rotated", part)
    dim = int(head_size * part)
    if dim % 2 or not dim:
        raise UnsupportedModel(f"config.json: {dim} of the {head_size} dims of a head are rotated; they come in pairs.")
    trained = positive(config, "original_max_position_embeddings", default=0)
    if kind == "default":
        return Rotary(theta=base, dim=dim), 1.0
    return _scaled(kind, merged, base, dim, positions, trained)


def _scaling(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The mapping that scales frequencies, and its key: `rope_scaling` before `rope_parameters`."""
    given = {key: config[key] for key in ("rope_scaling", "rope_parameters") if config.get(key)}
    for key, value in given.items():
        if not isinstance(value, Mapping):
            raise refuse(key, "an object", value)
        if any(isinstance(entry, Mapping) for entry in value.values()):
            raise UnsupportedModel(f"config.json: '{key}' by type of layer is not supported; all layers turn alike.")
        if {"rope_type", "type"} <= value.keys() and value["rope_type"] != value["type"]:
            said = f"'rope_type' {value['rope_type']!r} and 'type' {value['type']!r}"
            raise UnsupportedModel(f"config.json: '{key}' has {said}; keep one of them.")
    if len(given) == 2 and any(
        given["rope_scaling"][k] != given["rope_parameters"].get(k) for k in given["rope_scaling"]
    ):
        raise UnsupportedModel("config.json: 'rope_scaling' and 'rope_parameters' differ; keep one of them.")
    return next(reversed(given.items()), ("rope_scaling", {}))


def _scaled(
    kind: Any, given: Mapping[str, Any], theta: float, dim: int, positions: int, trained: int
) -> tuple[Rotary, float]:
    """The frequencies of a scaling; `trained` are the trained positions by the rest of the config, or 0."""
    original = trained or positive(given, "original_max_position_embeddings", default=positions)
    factor: float | None = None
    if kind == "yarn" and given.get("factor") is None:
        factor = max(positions / original, 1.0)
    elif given.get("factor") is None:
        raise UnsupportedModel(f"config.json: rotary scaling of type '{kind}' has no 'factor'.")
    else:
        factor = _factor(given)
    if kind == "linear":
        return Rotary(theta=theta, dim=dim, kind=kind, factor=factor), 1.0
    if kind == "dynamic":
        if original != positions:
            raise refuse("original_max_position_embeddings", f"{positions} with dynamic scaling, or absent", original)
        if dim == 2:
            raise UnsupportedModel("config.json: dynamic scaling needs more than two rotated dims of a head.")
        return Rotary(theta=theta, dim=dim, kind=kind, factor=factor, original=positions), 1.0
    slow_key, fast_key = ("beta_slow", "beta_fast") if kind == "yarn" else ("low_freq_factor", "high_freq_factor")
    if kind == "llama3" and not {slow_key, fast_key} <= given.keys():
        raise UnsupportedModel(f"config.json: rotary scaling of type 'llama3' needs '{slow_key}' and '{fast_key}'.")
    slow = number(given, slow_key, 1.0, above=0, most=_HUGE)
    fast = number(given, fast_key, 32.0 if kind == "yarn" else 4.0, above=0, most=_HUGE)
    if fast <= slow:
        raise refuse(fast_key, f"above '{slow_key}', which is {slow:g}", fast)
    truncate = flag(given, "truncate", default=True)
    rotary = Rotary(
        theta=theta, dim=dim, kind=kind, factor=factor, original=original, fast=fast, slow=slow, truncate=truncate
    )
    return rotary, _attention_factor(given, factor) if kind == "yarn" else 1.0


def _factor(given: Mapping[str, Any]) -> float:
    value = given["factor"]
    if not isinstance(value, int | float) or isinstance(value, bool) or not 1 <= value <= _HUGE:
        raise refuse("factor", "a number of at least 1", value)
    return float(value)


def _attention_factor(given: Mapping[str, Any], factor: float) -> float:
    """YaRN's attention factor: as given, or 0.1 ln(factor) + 1, or the quotient for `mscale` and `mscale_all_dim`."""
    if given.get("attention_factor") is not None:
        return number(given, "attention_factor", 1.0, above=0, most=_HUGE)
    upper, lower = (number(given, key, 0.0, above=-1, most=_HUGE) for key in ("mscale", "mscale_all_dim"))
    if upper and lower:
        return _mscale(factor, upper) / _mscale(factor, lower)
    return _mscale(factor, 1.0)


def _mscale(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0
