"""Small random programs with every kind of move, and the arithmetic of their memory done by hand, for the planner's tests.

A program has loops (one inside another under a plain choice), aliases, gaps, rotating buffers, and an escalating choice
that fetches weights from the host; in every second one a plain choice fetches some, too. `Exact` evaluates configurations
from the records of a body alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product

from mosaic.devices import DEVICES, load_device
from mosaic.planner.space import Config, Point, Space
from mosaic.planner.template import Template, compile_template
from mosaic.registrar.graph import Buffer, Graph
from mosaic.registrar.operator import Operator
from tests.fuzz.building import register as builder
from tests.fuzz.programs import random_program

PAGE = 4096
CARD = replace(
    DEVICES["rtx-3090"], page_bytes=PAGE, context_bytes=3 * PAGE, library_bytes=PAGE, bandwidth=1e9, host_link=4e8,
    launch_s=1e-6, gemm_rates={1: {16: 2e9, 64: 6e9, 256: 9e9, 1024: 1e10}},
)  # fmt: skip
"""Slow enough that small programs differ in time."""
CPU = replace(load_device("cpu"), page_bytes=PAGE, context_bytes=3 * PAGE, library_bytes=PAGE)
STREAMS = ("none", "half", "all")
OVER = Operator(name="over", operands="x:a[*T] -> y:a[*T]", inplace=(("y", "x"),))
PEEK = Operator(name="peek", operands="x:a[T, *S] -> y:f32[T, 1]")


class _Program:
    """Layers of two products with a residual, the wide one under a loop, and a head under another loop."""

    def __init__(self, seed: int, choices: Mapping[str, str] | None) -> None:
        rng = random.Random(seed)
        self.g = g = Graph("small", backend="cpu", choices=choices)
        self.tokens, self.parts = g.dim("tokens"), g.dim("parts", value=4)
        self.masked = g.dim("masked", at_most="tokens")
        self.width, self.layers = rng.choice((16, 24)), rng.randrange(2, 5)
        self.split, self.fetches = g.choice("way", ("whole", "parts")) == "parts", seed % 2 == 1
        self.stream = g.choice("stream", STREAMS, escalating=True)
        g.knob("parts", over=self.parts, tile=1)
        g.knob("body", over=self.tokens, tile=16)
        self.x = g.input("ids", (self.tokens, self.width), "float32")
        hidden = g.add_op("linear", self.x, self.weight("first", self.width, self.width, 0), name="hidden")
        for layer in range(self.layers):
            with g.scope(f"layers.{layer}"):
                self.layer(layer, hidden, rng.randrange(1, 6) * 16)
        self.head(hidden, rng.randrange(2, 12) * 16)

    def weight(self, name: str, rows: object, columns: object, layer: int) -> Buffer:
        """A matrix on the device, or fetched while the step runs."""
        g, shape = self.g, (rows, columns)
        first = {"none": self.layers + 1, "half": (self.layers + 1) // 2, "all": 0}[self.stream]
        if layer < first and not (self.split and self.fetches and name == "table"):
            return g.weight(name, shape, "float32")
        host = g.buffer(f"{name}@host", shape, "float32", kind="host", tensor=name)
        slot = g.buffer(name, shape, "float32", outside=True)
        with g.stream("weights"):
            g.add_op("copy", host, out=slot, name=f"{name}_fetch")
        g.wait("weights")
        return slot

    def layer(self, layer: int, hidden: Buffer, wide: int) -> None:
        g = self.g
        size = self.parts * (wide // 4) if self.split else wide
        up, down = self.weight("up", size, self.width, layer), self.weight("down", self.width, size, layer)
        if not self.split:
            self.products(hidden, up, down)
            return
        with g.chunk("parts", over=self.parts, tile=1):
            self.products(hidden, up, down)

    def products(self, hidden: Buffer, up: Buffer, down: Buffer) -> None:
        g = self.g
        with g.chunk("body", over=self.tokens, tile=16):
            y = g.add_op("linear", hidden, up, name="wide")
            z = g.add_op(OVER, y, name="act")
            g.add_alias(z, y)
            g.add_op("linear_add", z, down, hidden, name="narrow")

    def head(self, hidden: Buffer, wide: int) -> None:
        g = self.g
        rows = g.input("rows", (self.masked,), "int64")
        out = g.output("out", (self.masked, 1), "float32")
        table = self.weight("table", wide, self.width, self.layers)
        with g.chunk("head", over=self.masked, tile=16):
            h = g.add_op("gather_rows", hidden, rows, name="chosen")
            g.add_op(PEEK, g.add_op("linear", h, table, name="scores"), out=out, name="look")


def register(seed: int, choices: Mapping[str, str] | None) -> Graph:
    return _Program(seed, choices).g


@cache
def template(seed: int) -> Template:
    return compile_template(partial(register, seed))


@cache
def space(seed: int) -> Space:
    """Every third on a card whose launches cost next to nothing: chunks are free within the tolerance."""
    return Space(template(seed), CARD if seed % 3 else replace(CARD, launch_s=1e-10))


def drawn(seed: int) -> Point:
    """A program of the fuzzer's: aliases at offsets, gaps, double buffers, side streams, squares of dims."""
    program = random_program(seed)
    shape = {name: dim.value for name, dim in program.dims.items() if not dim.fixed}
    return Space(compile_template(builder(program)), CPU).at(shape)


def dims(tokens: int) -> dict[str, int]:
    return {"tokens": tokens, "masked": (tokens + 2) // 3}


class Exact:
    """The bytes of configurations at some dims, by sums over the live buffers, op by op."""

    def __init__(self, point: Point) -> None:
        self.point, self.template = point, point.space.template
        self._known: dict[Config, tuple[int, int]] = {}

    def combinations(self) -> list[tuple[str, ...]]:
        return list(product(*(choice.options for choice in self.template.choices)))

    def settings(self, choices: tuple[str, ...]) -> Iterator[tuple[int | None, ...]]:
        """The stated grid: off, or the tile times a power of two below the dim; off alone where there is no loop."""
        body = self.template.bodies[choices]
        ladders: list[list[int | None]] = []
        for knob in self.template.knobs:
            loops = any(region.knob == knob.name for region in body.regions)
            rows = [knob.tile << k for k in range(20)]
            ladders.append([None, *(r for r in rows if loops and r < self.point.dims[knob.over])])
        return product(*ladders)

    def configs(self) -> Iterator[Config]:
        for choices in self.combinations():
            for rows in self.settings(choices):
                yield Config(choices, rows)

    def live(self, config: Config) -> list[int]:
        """Bytes of the workspace at every op."""
        variant = self.point.space.variant(config)
        body, life = variant.body, variant.life
        sizes = body.evaluate(self.point.values(config)).tolist()
        extents: dict[int, int] = {}
        for b, record in enumerate(body.buffers):
            if record.pool == "workspace":
                root = b if record.alias_of is None else record.alias_of
                slot = -(-sizes[record.bytes] // 512) * 512 * record.rotate
                at = 0 if record.alias_of is None else sizes[record.alias_offset]
                extents[root] = max(extents.get(root, 0), at + slot)
        return [
            sum(
                size for b, size in extents.items()
                if life.starts[b] <= t < life.ends[b] and not any(low <= t < high for low, high in life.gaps[b])
            )
            for t in range(len(body.ops))
        ]  # fmt: skip

    def pool(self, config: Config, pool: str) -> int:
        body = self.template.bodies[config.choices]
        sizes = body.evaluate(self.point.values(config)).tolist()
        return pages(sum(-(-sizes[b.bytes] // 512) * 512 * b.rotate for b in body.buffers if b.pool == pool))

    def states(self, config: Config) -> list[str]:
        """The pools of states, one each."""
        return [b.pool for b in self.template.bodies[config.choices].buffers if b.kind == "state"]

    def bytes(self, config: Config) -> tuple[int, int]:
        """Bytes of the device, and of the host."""
        if config not in self._known:
            fixed = CARD.context_bytes + CARD.library_bytes + self.pool(config, "weights")
            fixed += sum(self.pool(config, pool) for pool in self.states(config))
            self._known[config] = fixed + pages(max(self.live(config))), self.pool(config, "host")
        return self._known[config]

    def fits(self, config: Config, budget: int, host: int) -> bool:
        device, pinned = self.bytes(config)
        return device <= budget and pinned <= host


def pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


def between(values: Sequence[int], share: float) -> int:
    """A budget part of the way from the least to the most."""
    return int(min(values) + share * (max(values) - min(values)))


def intervals(seed: int, ops: int = 12, room: int = 20) -> list[tuple[int, int, int]]:
    """Sizes, starts and ends of buffers that fill the room at every op: each op frees some, and fills what is free."""
    rng = random.Random(seed)
    alive: list[tuple[int, int]] = []
    found: list[tuple[int, int, int]] = []
    for op in range(ops):
        rng.shuffle(alive)
        for size, start in [alive.pop() for _ in range(rng.randint(1, max(1, len(alive) - 1)) if op else 0)]:
            found.append((size, start, op))
        while free := room - sum(size for size, _ in alive):
            alive.append((rng.randint(1, free), op))
    return found + [(size, start, ops) for size, start in alive]


FRAGMENTED = (13, 30, 48, 288, 324)
"""Seeds of `intervals` that no packing puts at the lower bound, proven by the exact solver."""


def fragmented(seed: int, g: Graph) -> None:
    """Ops over buffers of `intervals`, as many rows of each as there are tokens, and under a choice of another seed and
    narrower: what needs less by its bound may need more as packed."""
    tokens = g.dim("tokens")
    narrow = g.choice("width", ("wide", "narrow")) == "narrow"
    other = FRAGMENTED[FRAGMENTED.index(seed) - 1]
    found, columns = intervals(other if narrow else seed), 124 if narrow else 128
    buffers = [g.buffer(f"b{i}", (tokens, size * columns), "float32") for i, (size, _, _) in enumerate(found)]
    live(g, [(buffer, start, end) for buffer, (_, start, end) in zip(buffers, found, strict=True)])


def live(g: Graph, buffers: Sequence[tuple[Buffer, int, int]]) -> None:
    """Ops that write each buffer at its start and read it last before its end."""
    x, out = g.input("x", (1,), "float32"), g.output("out", (1,), "float32")
    last = max(end for _, _, end in buffers) - 1
    for op in range(last + 1):
        reads = [b for b, start, end in buffers if start < op == end - 1]
        writes = [*(b for b, start, _ in buffers if start == op), *([out] if op == last else [])]
        read = " ".join(f"r{i}:{b.dtype}[*R{i}]" for i, b in enumerate(reads))
        wrote = " ".join(
            f"w{i}:{b.dtype}[{', '.join(f'w{i}_{axis}' for axis in range(len(b.shape)))}]" for i, b in enumerate(writes)
        )
        sizes = {f"w{i}_{axis}": size for i, b in enumerate(writes) for axis, size in enumerate(b.shape)}
        rule = Operator(name=f"op{op}", operands=f"x:a[*X] {read} -> {wrote}", attrs=" ".join(sizes))
        g.add_op(rule, x, *reads, out=writes, **sizes)
