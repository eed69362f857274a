"""Declarations of a graph: dims, knobs, choices, names and buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from mosaic.errors import GraphError
from mosaic.registrar.dtypes import ITEMSIZE
from mosaic.registrar.operator import Dim, Spec, require
from mosaic.registrar.parts import Buffer, Choice, DimInfo, Kind, Region, caller
from mosaic.registrar.polynomial import Polynomial, symbol

SHARED: Final = frozenset({"weight", "state", "carry"})


class Declarations:
    """The dims, knobs, choices and buffers of a graph by name; see `Graph`."""

    def __init__(self, name: str, *, choices: Mapping[str, str] | None = None, lenient: bool = False) -> None:
        self.name, self.lenient = name, lenient
        self.dims: dict[str, DimInfo] = {}
        self.buffers: list[Buffer] = []
        self.choices: dict[str, Choice] = {}
        self.tiles: dict[str, int] = {}
        self.knob_dims: dict[str, Polynomial] = {}
        self._given = dict(choices or {})
        self._names: dict[str, Buffer] = {}
        self._scope: list[str] = []
        self._part = ""
        self._region: Region | None = None
        self._sizes: set[Polynomial] = set()

    # -- dims, knobs, names -------------------------------------------------------------------------------------

    def dim(self, name: str, *, at_most: str | None = None, value: int | None = None) -> Polynomial:
        """Declare (or fetch) a symbolic dim; `at_most` bounds it by another dim, `value` fixes it.

        Raises
        ------
        GraphError
            If the bound is an undeclared dim, or bound or value differ from an earlier declaration.
        """
        if at_most is not None and at_most not in self.dims:
            raise GraphError(f"dim '{name}' ({caller()}): bounded by '{at_most}', which is not declared yet")
        known = self.dims.get(name)
        if name.removesuffix("_rows") in self.tiles and name.endswith("_rows"):
            raise GraphError(
                f"dim '{name}' ({caller()}): the rows of the chunk knob '{name.removesuffix('_rows')}' have this name"
            )
        if known is None:
            found = symbol(name)
        else:
            found = known.symbol
            for what, old, new in (("at_most", known.at_most, at_most), ("value", known.value, value)):
                if old is not None and new is not None and old != new:
                    raise GraphError(f"dim '{name}' ({caller()}): asked for {what}={new}, declared with {what}={old}")
            at_most, value = at_most or known.at_most, value or known.value
        self.dims[name] = DimInfo(symbol=found, at_most=at_most, value=value)
        return found

    def choice(self, name: str, options: Sequence[str], *, escalating: bool = False, alike: bool = True) -> str:
        """Declare a choice, which selects the registered ops, and return its option in this registration.

        `alike` says whether all options round alike. If not, batch-invariant plans take the first.
        """
        value = self._given.get(name, options[0])
        if self.lenient and value not in options:
            value = options[0]
        require(value in options, f"choice '{name}' ({caller()}) is one of {', '.join(options)}, got '{value}'")
        self.choices[name] = Choice(name, tuple(options), value, escalating, alike)
        return value

    def knob(self, name: str, *, over: Polynomial, tile: int = 128) -> None:
        """Declare a chunk knob before its regions, for knobs that only some choices use.

        Raises
        ------
        GraphError
            As for `chunk`.
        """
        self._check_knob(name, over, tile, caller())
        self.tiles[name] = tile
        self.knob_dims[name] = over

    def _check_knob(self, knob: str, over: Polynomial, tile: int, source: str) -> None:
        """Check that a knob has one dim and one tile, and is never nested in itself."""
        if not isinstance(over, Polynomial) or over.name not in self.dims:
            raise GraphError(f"chunk '{knob}' ({source}): over= must be a dim of this graph, got {over}")
        known = self.knob_dims.get(knob, over)
        if known != over:
            raise GraphError(f"chunk '{knob}' ({source}): over {over}, but the same knob is over {known} elsewhere")
        if self.tiles.get(knob, tile) != tile:
            raise GraphError(
                f"chunk '{knob}' ({source}): tile {tile}, but the same knob was given tile {self.tiles[knob]}"
            )
        if f"{knob}_rows" in self.dims:
            raise GraphError(
                f"chunk '{knob}' ({source}): its rows would be called {knob}_rows, which is a dim; name it otherwise"
            )

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Prefix the names registered inside with `name/`."""
        self._scope.append(name)
        try:
            yield
        finally:
            self._scope.pop()

    @property
    def scopes(self) -> tuple[str, ...]:
        """Names of the open scopes, the outermost first."""
        return tuple(self._scope)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Register one phase of a joined step: its ops and its own buffers are prefixed, weights, state and carries shared."""
        outer, self._part = self._part, name
        try:
            yield
        finally:
            self._part = outer

    def _full(self, name: str, *, shared: bool = False) -> str:
        prefix = [self._part] if self._part and not shared else []
        return "/".join([*prefix, *self._scope, name])

    # -- buffers ------------------------------------------------------------------------------------------------

    def buffer(
        self,
        name: str,
        shape: Sequence[Dim],
        dtype: str,
        *,
        kind: Kind = "transient",
        tensor: str | None = None,
        rotate: int = 1,
        outside: bool = False,
    ) -> Buffer:
        """Create a buffer; inside a chunk region its home is that region unless `outside`.

        Parameters
        ----------
        shape
            Ints and dims.
        tensor
            A weight's name in the checkpoint; `a.{0:64}.b` stacks 64 tensors along a new first axis. A host buffer with
            a name is a weight in host memory: the same name gives the same buffer.
        rotate
            Slots of a double buffer in a body that is laid out once; iteration i uses slot i mod `rotate`.
        """
        source = caller()
        full = self._full(name, shared=kind in SHARED)
        if kind == "host" and tensor is not None and full in self._names:
            return self._same(self._names[full], Spec(tuple(shape), dtype), kind, tensor)
        if dtype not in ITEMSIZE:
            raise GraphError(f"{full} ({source}): unknown dtype '{dtype}', one of {', '.join(ITEMSIZE)}")
        for dim in shape:
            if not self._is_size(dim):
                raise GraphError(f"{full} ({source}): {dim!r} is no size; use positive integers and dims of this graph")
        if full in self._names:
            raise GraphError(
                f"{full} ({source}): the name is taken by {self._names[full]} ({self._names[full].source})"
            )
        home = None if outside or kind not in ("transient", "scratch") else self._region
        buffer = Buffer(
            id=len(self.buffers), name=full, kind=kind, spec=Spec(tuple(shape), dtype), home=home, tensor=tensor,
            rotate=rotate, source=source,
        )  # fmt: skip
        self.buffers.append(buffer)
        self._names[full] = buffer
        return buffer

    def _is_size(self, dim: object) -> bool:
        if isinstance(dim, Polynomial):
            if dim not in self._sizes:
                if not all(name in self.dims or name.removesuffix("_rows") in self.tiles for name in dim.names):
                    return False
                self._sizes.add(dim)
            return True
        return isinstance(dim, int) and not isinstance(dim, bool) and dim > 0

    def input(self, name: str, shape: Sequence[Dim], dtype: str) -> Buffer:
        """Declare a buffer that the caller fills before the step."""
        return self.buffer(name, shape, dtype, kind="input")

    def output(self, name: str, shape: Sequence[Dim], dtype: str) -> Buffer:
        """Declare a buffer that holds its value when the step ends, until the next call."""
        return self.buffer(name, shape, dtype, kind="output")

    def state(self, name: str, shape: Sequence[Dim], dtype: str) -> Buffer:
        """Declare memory that outlives a step; the same name gives the same buffer."""
        return self._shared(name, shape, dtype, "state", None)

    def carry(self, name: str, shape: Sequence[Dim], dtype: str) -> Buffer:
        """Declare memory handed from one graph of a step to the next; the same name gives the same buffer."""
        return self._shared(name, shape, dtype, "carry", None)

    def weight(self, name: str, shape: Sequence[Dim], dtype: str, *, tensor: str | None = None) -> Buffer:
        """Declare a parameter; registering the same name twice ties the two uses."""
        return self._shared(name, shape, dtype, "weight", tensor)

    def _shared(self, name: str, shape: Sequence[Dim], dtype: str, kind: Kind, tensor: str | None) -> Buffer:
        found = self._names.get(self._full(name, shared=True))
        if found is None:
            return self.buffer(name, shape, dtype, kind=kind, tensor=tensor)
        return self._same(found, Spec(tuple(shape), dtype), kind, tensor)

    def _same(self, found: Buffer, spec: Spec, kind: Kind, tensor: str | None) -> Buffer:
        """Return a buffer that is declared again; it must have the same kind, spec and tensor."""
        if found.kind != kind or found.spec != spec:
            raise GraphError(
                f"{found.name} ({caller()}): asked for a {kind} {spec}, "
                f"but it is a {found.kind} {found.spec} ({found.source})"
            )
        if tensor is not None and tensor != found.tensor:
            raise GraphError(
                f"{found.name} ({caller()}): asked for tensor '{tensor}', but it is '{found.tensor}' ({found.source})"
            )
        return found

    def __getitem__(self, name: str) -> Buffer:
        """Fetch a buffer by its full name."""
        if name not in self._names:
            raise GraphError(f"no buffer '{name}' in graph '{self.name}'")
        return self._names[name]
