"""Compiled templates on disk: JSON coefficient tables, keyed by configuration and version.

Nothing cached is executed or unpickled. A cache that cannot be read or written
is as good as none: the template is compiled again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np

import mosaic
from mosaic.files import write_atomic
from mosaic.models import Model
from mosaic.planner.template import (
    Body,
    BufferRecord,
    DimRecord,
    KnobRecord,
    OpRecord,
    RegionRecord,
    Template,
    compile_template,
    linear_columns,
)
from mosaic.version import __version__

__all__ = ["cache_directory", "template_of"]

FORMAT: Final = 1
_loaded: dict[str, Template] = {}


def cache_directory() -> Path | None:
    """Where templates are kept: `MOSAIC_CACHE`, or the user's cache directory; None if `MOSAIC_CACHE` is empty."""
    given = os.environ.get("MOSAIC_CACHE")
    if given is not None:
        return Path(given) if given else None
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mosaic"


def template_of(model: Model, *, backend: str = "cuda", logits: bool = False) -> Template:
    """The compiled template of a model: from memory, from disk, or compiled now."""
    key = _key(model, backend, logits)
    if key not in _loaded:
        _loaded[key] = _through_disk(key, lambda: _compile(model, backend, logits))
    return _loaded[key]


def _compile(model: Model, backend: str, logits: bool) -> Template:
    return compile_template(lambda choices: model.graph(backend=backend, choices=choices, logits=logits))


def _key(model: Model, backend: str, logits: bool) -> str:
    what = repr((FORMAT, __version__, _sources(), model.family, model.architecture, backend, logits))
    return hashlib.sha256(what.encode()).hexdigest()[:32]


@cache
def _sources() -> str:
    """A fingerprint of the code that templates come from, so that a changed checkout never meets a stale cache."""
    root = Path(mosaic.__file__).parent
    files = sorted(p for room in ("registrar", "models", "planner") for p in (root / room).rglob("*.py"))
    stats = [(p.name, (s := p.stat()).st_size, s.st_mtime_ns) for p in files]
    return hashlib.sha256(repr(stats).encode()).hexdigest()


def _through_disk(key: str, compile_now: Callable[[], Template]) -> Template:
    directory = cache_directory()
    if directory is None:
        return compile_now()
    file = directory / f"template-{key}.json"
    try:
        return _decode(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError, IndexError, RecursionError):
        pass
    template = compile_now()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_atomic(file, json.dumps(_encode(template), separators=(",", ":")))
    except OSError:
        pass
    return template


def _encode(template: Template) -> dict[str, Any]:
    return {
        "name": template.name,
        "backend": template.backend,
        "dims": template.dims,
        "knobs": template.knobs,
        "choices": template.choices,
        "bodies": [[choices, _encode_body(body)] for choices, body in template.bodies.items()],
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
        choices=tuple((name, tuple(options)) for name, options in plain["choices"]),
        bodies={tuple(choices): _decode_body(body) for choices, body in plain["bodies"]},
    )


def _decode_body(plain: dict[str, Any]) -> Body:
    exponents = np.array(plain["exponents"], dtype=np.int64)
    return Body(
        variables=tuple(plain["variables"]),
        exponents=exponents,
        linear=linear_columns(exponents),
        coefficients=np.array(plain["coefficients"], dtype=np.int64),
        denominators=np.array(plain["denominators"], dtype=np.int64),
        ops=tuple(OpRecord(*op) for op in plain["ops"]),
        buffers=tuple(BufferRecord(*b) for b in plain["buffers"]),
        regions=tuple(RegionRecord(*r) for r in plain["regions"]),
        barriers=tuple((name, ids, start, end) for name, ids, start, end in plain["barriers"]),
        edges=tuple((kind, source, target) for kind, source, target in plain["edges"]),
    )
