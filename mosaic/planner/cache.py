"""Compiled templates on disk: JSON coefficient tables, keyed by configuration and version.

Nothing cached is executed or unpickled. A cache that cannot be read or written
is as good as none: the template is compiled again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np

from mosaic.files import write_atomic
from mosaic.models import Model
from mosaic.models.phase import FULL_STEP, Phase
from mosaic.planner.polynomials import factor_columns
from mosaic.planner.template import (
    Bodies,
    Body,
    BufferRecord,
    ChoiceRecord,
    DimRecord,
    KnobRecord,
    OpRecord,
    RegionRecord,
    Template,
    compile_choices,
    compile_template,
)
from mosaic.registrar.schemes.plain import PLAIN
from mosaic.version import __version__

__all__ = ["Watcher", "cache_directory", "forget", "template_of"]

FORMAT: Final = 4
Kept = TypeVar("Kept")
Watcher: TypeAlias = Callable[[str], None]
"""Told the name of a body before it is compiled."""
_loaded: dict[tuple[str, Phase], tuple[Template, dict[tuple[str, ...], Body]]] = {}
"""The templates of this process, and those of their bodies that it has asked for."""


def cache_directory() -> Path | None:
    """Return where templates are kept: `MOSAIC_CACHE`, or the user's cache directory; None if `MOSAIC_CACHE` is empty."""
    given = os.environ.get("MOSAIC_CACHE")
    if given is not None:
        return Path(given) if given else None
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mosaic"


def template_of(
    model: Model, *, backend: str = "cuda", phase: Phase = FULL_STEP, watcher: Watcher | None = None
) -> Template:
    """Return the template of a model's phase: from memory, from disk, or compiled now; its bodies likewise, one by one.

    A phase with parts of a user's own, and a scheme of a user's, is not kept on disk: nothing says that their code is still the
    same.
    """
    key = _key(model, backend, phase)
    keep = _through_disk if phase.shipped and model.architecture.scheme is PLAIN else _in_memory
    register = partial(_register, model, backend, phase)
    if (key, phase) not in _loaded:
        shell = keep(f"template-{key}", lambda: compile_template(register), _encode, _decode)
        _loaded[key, phase] = shell, {}
    shell, known = _loaded[key, phase]

    def compile_now(options: tuple[str, ...]) -> Body:
        if watcher is not None:
            watcher(f"{phase.name} ({', '.join(options)})")
        return compile_choices(register, shell, options)

    def body(options: tuple[str, ...]) -> Body:
        name = "-".join([key, *options]).replace("%", "")
        return keep(f"body-{name}", lambda: compile_now(options), _encode_body, _decode_body)

    return replace(shell, bodies=Bodies(shell.choices, body, known=known))


def forget() -> None:
    """Drop the templates of this process; those on disk stay."""
    _loaded.clear()


def _register(model: Model, backend: str, phase: Phase, choices: Mapping[str, str] | None) -> Any:
    return model.graph(backend=backend, choices=choices, phase=phase, brief=phase.shipped)


def _key(model: Model, backend: str, phase: Phase) -> str:
    what = repr((FORMAT, __version__, _sources(), model.family, model.architecture, backend, phase))
    return hashlib.sha256(what.encode()).hexdigest()[:32]


@cache
def _sources() -> str:
    """A fingerprint of the code that templates come from, so that a changed checkout never meets a stale cache."""
    root = Path(__file__).parents[1]
    files = sorted(p for room in ("registrar", "models", "planner") for p in (root / room).rglob("*.py"))
    stats = [(p.name, (s := p.stat()).st_size, s.st_mtime_ns) for p in files]
    return hashlib.sha256(repr(stats).encode()).hexdigest()


def _in_memory(
    name: str, compile_now: Callable[[], Kept], encode: Callable[[Kept], Any], decode: Callable[[Any], Kept]
) -> Kept:
    return compile_now()


def _through_disk(
    name: str, compile_now: Callable[[], Kept], encode: Callable[[Kept], Any], decode: Callable[[Any], Kept]
) -> Kept:
    directory = cache_directory()
    if directory is None:
        return compile_now()
    file = directory / f"{name}.json"
    try:
        return decode(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError, IndexError, RecursionError):
        pass
    compiled = compile_now()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_atomic(file, json.dumps(encode(compiled), separators=(",", ":")), durable=False)
    except OSError:
        pass
    return compiled


def _encode(template: Template) -> dict[str, Any]:
    return {
        "name": template.name,
        "backend": template.backend,
        "dims": template.dims,
        "knobs": template.knobs,
        "choices": template.choices,
    }


def _encode_body(body: Body) -> dict[str, Any]:
    return {
        "variables": body.variables,
        "exponents": body.exponents.tolist(),
        "coefficients": body.coefficients.tolist(),
        "denominators": body.denominators.tolist(),
        "ops": body.ops,
        "buffers": body.buffers,
        "regions": body.regions,
        "barriers": body.barriers,
        "edges": body.edges,
    }


def _decode(plain: dict[str, Any]) -> Template:
    return Template(
        name=plain["name"],
        backend=plain["backend"],
        dims=tuple(DimRecord(*d) for d in plain["dims"]),
        knobs=tuple(KnobRecord(*k) for k in plain["knobs"]),
        choices=tuple(ChoiceRecord(name, tuple(options), *said) for name, options, *said in plain["choices"]),
        bodies={},
    )


def _decode_body(plain: dict[str, Any]) -> Body:
    exponents = np.array(plain["exponents"], dtype=np.int64)
    return Body(
        variables=tuple(plain["variables"]),
        exponents=exponents,
        factors=factor_columns(exponents),
        coefficients=np.array(plain["coefficients"], dtype=np.int64),
        denominators=np.array(plain["denominators"], dtype=np.int64),
        ops=tuple(OpRecord(*op) for op in plain["ops"]),
        buffers=tuple(BufferRecord(*b) for b in plain["buffers"]),
        regions=tuple(RegionRecord(*r) for r in plain["regions"]),
        barriers=tuple((name, ids, start, end) for name, ids, start, end in plain["barriers"]),
        edges=tuple((kind, source, target) for kind, source, target in plain["edges"]),
    )
