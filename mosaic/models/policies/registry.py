"""The list of policies by a request's field and options. Only this file names policies of other files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from mosaic.errors import UnknownName, UsageError
from mosaic.models.policies.block_cache import Freezing
from mosaic.models.policies.flashblock import PrefixReuse, Reusing
from mosaic.models.policies.focus import Evicting
from mosaic.models.policies.focus_options import Eviction
from mosaic.models.policies.mage import Selecting
from mosaic.models.policies.mage_options import SparseAttention
from mosaic.models.policies.policy import Options, Policy
from mosaic.models.policies.sparse_keys import Keeping, SparseKeys
from mosaic.models.policies.spelled import spelled

if TYPE_CHECKING:
    from mosaic.models.architecture import Architecture

POLICIES: Final[Mapping[str, Mapping[type, type[Policy]]]] = {
    "cache": {SparseKeys: Keeping},
    "attention": {SparseAttention: Selecting, PrefixReuse: Reusing},
    "block_cache": {str: Freezing},
    "eviction": {Eviction: Evicting},
}
"""By field of a request: the types of options that it takes, and the policy of each; hooks are called in this order."""
PLAIN: Final[Mapping[str, tuple[str, ...]]] = {"cache": ("prefix", "dual")}
"""The names that such a field also takes, which have neither options nor a policy."""
KINDS: Final[Mapping[str, tuple[type[Options], ...]]] = {
    field: kinds
    for field, made in POLICIES.items()
    if (kinds := tuple(kind for kind in made if issubclass(kind, Options)))
}
"""The fields whose options can be given as text, and their types of options."""
NAMES: Final[Mapping[str, Mapping[str, Options]]] = {
    field: {name: preset for kind in kinds for name, preset in kind.presets().items()} for field, kinds in KINDS.items()
}
"""The presets of such a field, by name."""


def policies_of(config: Any, arch: Architecture, positions: int = 0) -> tuple[Policy, ...]:
    """Return the policies of a request, in the order in which their hooks are called.

    Parameters
    ----------
    config
        The request's `GenerationConfig`, resolved.
    positions
        Length of the request's canvas.

    Raises
    ------
    UsageError
        If options contradict other options of the request.
    """
    return tuple(
        made(options, config, arch, positions)
        for field, kinds in POLICIES.items()
        if (options := getattr(config, field)) is not None
        for kind, made in kinds.items()
        if isinstance(options, kind)
    )


def options_of(field: str, value: object) -> Any:
    """Return the options that a field's text names; options, and names without any, are returned unchanged.

    Presets are combined with "+". Options may follow, such as "mage:k=1024:every=8".

    Raises
    ------
    UsageError
        If it is neither text nor options, or a value is invalid. UnknownName: if there is no such preset or option.
    """
    kinds, presets, plain = KINDS[field], NAMES[field], PLAIN.get(field, ())
    if isinstance(value, kinds) or (isinstance(value, str) and value in plain):
        return value
    if not isinstance(value, str):
        given = ", ".join(f"{kind.__name__}(…)" for kind in kinds)
        raise UsageError(f"{field} is {value!r}; it must be {given}, or one of {', '.join([*plain, *presets])}.")
    name, options = spelled(value)
    if name in plain:
        raise UsageError(f"{field} '{name}' has no options; {', '.join(options)} is for {', '.join(presets)}.")
    together = {
        f"{one}+{other}": both
        for one, first in presets.items()
        for other, second in presets.items()
        if (both := first.joined(second)) is not None
    }
    known = {**presets, **together}
    if name not in known:
        raise UnknownName(field, name, [*plain, *known])
    taken = dict.fromkeys(option for kind in kinds for option in kind.names())
    for option in options:
        if option not in taken:
            raise UnknownName(f"option of '{name}'", option, [*taken])
    return known[name].with_options(options)


def attention_policy(value: str | Options) -> SparseAttention | PrefixReuse:
    """Return the attention options that a text names, as `options_of` does.

    >>> str(attention_policy("oracle")), str(attention_policy("mage+flashblock:k=256:reuse_steps=4"))
    ('oracle', 'sparse(k=256, reuse=reuse(steps=4))')
    """
    found: SparseAttention | PrefixReuse = options_of("attention", value)
    return found


def token_eviction(value: str | Options) -> Eviction:
    """Return the eviction options that a text names, as `options_of` does.

    >>> token_eviction("focus-public").history, str(token_eviction("focus:keep=4:rank=random"))
    ('block', "eviction(keep=4, rank='random')")
    """
    found: Eviction = options_of("eviction", value)
    return found
