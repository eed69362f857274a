"""Whether another checkout gives the same tokens, and plans that are no worse.

    python -m benchmarks.golden record before.json
    python -m benchmarks.golden compare before.json after.json

`record` runs the tree that is imported: tiny models of every family with every algorithm and policy, and `mosaic plan` for the
shipped models. It stands on public interfaces and imports no other benchmark, so that this file records older and newer
trees: `PYTHONPATH=TREE python -P benchmarks/golden.py record …`.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar
from zlib import crc32

if TYPE_CHECKING:
    import mosaic

Options = dict[str, Any]
Record = Mapping[str, Any]
T = TypeVar("T")

# --- tokens -----------------------------------------------------------------------------------------------------------

MASK, VOCABULARY, BLOCK = 95, 96, 8
PROMPTS: Final = (3, 13, 40)
"""Tokens of the prompts: shorter than a block, with a tail, and several blocks."""
_TOKENS: Final = {"mask_token_id": MASK, "eos_token_id": 7, "torch_dtype": "float32"}
_SIZES: Final = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 48, "vocab_size": VOCABULARY, "max_position_embeddings": 512, **_TOKENS,
}  # fmt: skip
_EXPERTS: Final = {**_SIZES, "num_experts": 4, "num_experts_per_tok": 2}
CONFIGS: Final[Mapping[str, Options]] = {
    "llada": {
        "model_type": "llada", "d_model": 32, "n_layers": 4, "n_heads": 4, "mlp_hidden_size": 48,
        "embedding_size": VOCABULARY, "max_sequence_length": 512, **_TOKENS,
    },
    "llada-moe": {**_EXPERTS, "model_type": "lladamoe", "expert_intermediate_size": 24},
    "dream": {**_SIZES, "model_type": "Dream"},
    "sdar": {**_SIZES, "model_type": "sdar", "block_size": BLOCK},
    "fast-dllm-v2": {**_SIZES, "model_type": "Fast_dLLM_Qwen", "bd_size": BLOCK},
    "llada2": {
        **_EXPERTS, "model_type": "llada2_moe", "block_size": BLOCK, "moe_intermediate_size": 24,
        "num_shared_experts": 1, "first_k_dense_replace": 1,
    },
}  # fmt: skip

_ATTENTION: Final = (
    "mage:k=8:exact_layers=1", "mage:k=6:exact_layers=0:per=query_head", "mage:k=8:page=4:exact_layers=1",
    "mage:k=4:rows=2:exact_layers=1:voters=answer:statistic=worst", "mage:k=3:exact_layers=1:carried=true:every=2",
    "mage:k=24:mass=0.5:exact_layers=1", "oracle:k=5:exact_layers=1", "sparsed:k=6:exact_steps=0.3:exact_layers=1",
    "quest:k=9:page=3:exact_layers=1", "flashblock", "flashblock:reuse_steps=2", "flashblock:reuse_change=0.4",
    "mage+flashblock:k=8:exact_layers=2:reuse_steps=2", "quest+flashblock:k=8:page=2:exact_layers=2",
)  # fmt: skip
_EVICTION: Final = ("focus", "focus-public", "focus:alpha=1.2", "focus:keep=3", "focus:rank=random")
_CACHES: Final = ({}, *({"block_cache": c, "block_commit": k} for c in ("dc", "dc+") for k in ("exact", "cached")))
_SAMPLING: Final[Sequence[Options]] = (
    {}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.7}, {"temperature": 1.3, "top_p": 0.8, "top_k": 5},
)  # fmt: skip
_WARMTH: Final = (0.0, 0.7)
_CANVAS: Final[Sequence[Options]] = (
    {"block_length": 4, "steps": [3, 6, 12], "remasking": ["low_confidence", "random"], "temperature": _WARMTH},
    {"block_length": 4, "steps": 6, "cfg_scale": 0.5, "temperature": _WARMTH},
    {"block_length": 4, "steps": [3, 6], "cache": ["prefix", "dual"], "temperature": _WARMTH},
    {"block_length": 12, "steps": 12, "cache": "dual", "eviction": _EVICTION},
)
_FAST: Final[Sequence[Options]] = (
    {
        "algorithm": "fast-dllm", "block_length": 6, "cache": [None, "prefix", "dual"], "temperature": _WARMTH,
        "rule": [{"threshold": 0.3}, {"threshold": 1.0}, {"factor": 0.7}, {"factor": 1.0}],
    },
    {"algorithm": "fast-dllm", "block_length": 6, "cache": "dual", "eviction": _EVICTION, "temperature": _WARMTH},
)  # fmt: skip
_BLOCKS: Final[Sequence[Options]] = (
    {"algorithm": "sdar", "remasking": "sequential", "steps": [3, 8], "sampling": _SAMPLING},
    {
        "algorithm": "sdar", "remasking": ["low_confidence_static", "low_confidence_dynamic"], "steps": [3, 8],
        "threshold": 0.4, "sampling": _SAMPLING,
    },
    {"algorithm": "sdar", "threshold": [0.3, 0.9], "temperature": _WARMTH},
    {"algorithm": "llada2", "threshold": [0.3, 0.95], "minimal_topk": [1, 6], "temperature": _WARMTH},
    {
        "algorithm": "llada2.1", "threshold": [0.2, 0.95], "temperature": _WARMTH,
        "rule": [{"edit_threshold": e, "max_post_steps": n} for e, n in ((0.9, 16), (0.2, 16), (0.0, 2), (0.3, 0))],
    },
    {"algorithm": "sdar", "threshold": 0.6, "attention": _ATTENTION, "temperature": _WARMTH},
    {"algorithm": "sdar", "threshold": 0.6, "eviction": [None, *_EVICTION], "caches": _CACHES},
    {
        "algorithm": "llada2", "threshold": 0.6, "attention": _ATTENTION[::4], "eviction": [None, "focus"],
        "caches": (*_CACHES[:2], *_CACHES[3:]),
    },
)  # fmt: skip
_SMALL_BLOCKS: Final[Sequence[Options]] = (
    {
        "threshold": 0.4, "sampling": _SAMPLING[:3],
        "blocks": [{"small_block_length": n, "cache": c} for n, c in ((8, None), (4, None), (4, "dual"), (2, "dual"))],
    },
    {"threshold": 0.6, "attention": _ATTENTION, "blocks": [{}, {"small_block_length": 2, "cache": "dual"}]},
    {"threshold": 0.6, "eviction": [None, *_EVICTION], "block_cache": [None, "dc", "dc+"]},
    {"threshold": 0.6, "attention": _ATTENTION[::4], "eviction": "focus", "block_cache": [None, "dc+"]},
)  # fmt: skip
_DREAM: Final[Sequence[Options]] = (
    {"steps": [5, 15], "alg": ["origin", "maskgit_plus", "topk_margin", "entropy"], "sampling": _SAMPLING},
    {"steps": 5, "alg": "maskgit_plus", "alg_temp": 0.4},
)
GRIDS: Final[Mapping[str, Sequence[Options]]] = {
    "llada": (*_CANVAS, *_FAST), "llada-moe": (*_CANVAS, *_FAST[1:]), "dream": (*_DREAM, *_FAST),
    "sdar": _BLOCKS, "fast-dllm-v2": _SMALL_BLOCKS, "llada2": _BLOCKS[2:],
}  # fmt: skip
"""By family, products of options: each a value or several. A mapping among values is several options that go together."""


class TokenCase(NamedTuple):
    """Requests of one model: a batch, or arriving and leaving ones in a session."""

    family: str
    way: str
    requests: tuple[Options, ...]

    @property
    def name(self) -> str:
        asked = " | ".join(",".join(f"{key}={value}" for key, value in one.items()) for one in self.requests)
        return f"{self.family} {self.way}: {asked}"


def points(grid: Options) -> Iterator[Options]:
    """Every combination of a grid's values; None leaves a field out."""
    axes = [values if isinstance(values, list | tuple) else (values,) for values in grid.values()]
    for point in product(*axes):
        found: Options = {}
        for name, value in zip(grid, point, strict=True):
            found |= value if isinstance(value, Mapping) else {name: value}
        yield {name: value for name, value in found.items() if value is not None}


def token_cases() -> list[TokenCase]:
    """All batches, an eighth of them again batch invariant, and sessions of six requests drawn from the same options."""
    found = []
    for family, grids in GRIDS.items():
        length = {"gen_length": 12 if not CONFIGS[family].keys() & {"block_size", "bd_size"} else 19, "seed": 4}
        options = [{**length, **point} for grid in grids for point in points(grid)]
        found += [TokenCase(family, "batch", (one,)) for one in options]
        source = random.Random(family)
        found += [
            TokenCase(family, f"session {number}", tuple(source.sample(options, min(6, len(options)))))
            for number in range(12)
        ]
        found += [TokenCase(family, "batch invariant", (one,)) for one in options[::8]]
    return found


@contextmanager
def models() -> Iterator[Any]:
    """A function from a family and whether it is batch invariant to its tiny model.

    Weights are drawn by their names in a checkpoint, so that no tree's own layout or order of weights changes them.
    """
    import torch
    from safetensors.torch import load_file, save_file

    import mosaic

    made: dict[tuple[str, bool], mosaic.CompiledModel] = {}

    def draw(name: str, shape: torch.Size) -> torch.Tensor:
        drawn: torch.Tensor = torch.randn(shape, generator=torch.Generator().manual_seed(crc32(name.encode())))
        if len(shape) == 1:
            return drawn if "bias" in name else 1.0 + 0.2 * drawn
        if "embed" in name or "wte" in name:
            drawn[MASK] *= 0.3  # most tokens are masks, which carry little information
            return drawn
        scale: float = shape[-1] ** -0.5
        return 3.0 * drawn * scale

    def model(family: str, invariant: bool) -> mosaic.CompiledModel:
        if (family, invariant) not in made:
            with TemporaryDirectory() as folder:
                with mosaic.compile(CONFIGS[family], device="cpu", host_budget=0) as empty:
                    empty.save(folder)
                file = Path(folder, "model.safetensors")
                save_file({name: draw(name, tensor.shape) for name, tensor in load_file(file).items()}, file)
                found = mosaic.compile(folder, device="cpu", host_budget=0, batch_invariant=invariant)
                made[family, invariant] = closing.enter_context(found)
        return made[family, invariant]

    with ExitStack() as closing:
        yield model


def prompt(length: int) -> list[int]:
    """Token ids that are neither special nor the mask."""
    source = random.Random(length)
    return [source.randrange(8, MASK) for _ in range(length)]


def generate(case: TokenCase, model: mosaic.CompiledModel) -> Record:
    """The tokens and the number of steps of every request, or why it was refused."""
    from mosaic import MosaicError

    try:
        if case.way.startswith("session"):
            found, refused = share(case, model)
        else:
            found = model.generate([prompt(n) for n in PROMPTS], stop_at_eos=False, **case.requests[0])
            refused = []
    except MosaicError as error:
        return {"refused": [refusal(error)]}
    return {
        "tokens": [one.token_ids.tolist() for one in found], "steps": [one.steps for one in found], "refused": refused,
    }  # fmt: skip


def share(case: TokenCase, model: mosaic.CompiledModel) -> tuple[list[mosaic.Generation], list[str]]:
    """Submit a request of another length after every few steps, and go on to the end of all."""
    from mosaic import GenerationConfig, MosaicError

    source, requests, refused = random.Random(case.name), [], []
    with model.session() as session:
        for number, options in enumerate(case.requests):
            try:
                asked = GenerationConfig(**options)
                requests.append(session.submit(prompt(PROMPTS[number % 3]), asked, request_id=number))
            except MosaicError as error:
                refused.append(f"{number}: {refusal(error)}")
            session.advance(source.randrange(4))
        while session.live:
            session.advance()
    return [request.generation for request in requests if request.generation is not None], refused


def record_tokens(sample: int | None) -> dict[str, Record]:
    """The generated tokens of every case, or of a sample."""
    import torch

    torch.set_num_threads(1)
    with models() as model:
        return {
            case.name: generate(case, model(case.family, case.way == "batch invariant"))
            for case in told(some(token_cases(), sample), "token cases")
        }


# --- plans ------------------------------------------------------------------------------------------------------------

_BLOCKWISE: Final = ("sdar-8b", "sdar-1.7b", "fast-dllm-v2-7b", "llada2-mini")
_PRESETS: Final = ("llada-8b", "dream-7b", "llada-moe", "sdar-4b", "fast-dllm-v2-1.5b", *_BLOCKWISE)
_DEVICES: Final = ("rtx-3090", "rtx-4090", "l40s", "a100-40g", "a100-80g", "h100", "h200", "cpu")
_FEW: Final = ("rtx-4090", "h100", "h200")
_SPARSE: Final = (
    "mage", "mage:k=1024:every=8", "mage:rows=2", "oracle", "sparsed", "quest", "flashblock", "quest+flashblock",
)  # fmt: skip
PLANS: Final[Sequence[Options]] = (
    {"model": _PRESETS, "device": _DEVICES, "ctx": ["2k", "16k", "128k"]},
    {
        "model": _PRESETS, "device": ["rtx-3090", "h100"], "ctx": ["16k", "128k"],
        "budget": ["7GiB", "17GiB"], "host-budget": [None, "64GiB"],
    },
    {
        "model": _PRESETS, "device": _FEW, "seq-lens": ["4k,32k", "1000,64,700,1"],
        "rows": [{}, {"mask-ratio": 0.1}, {"masked": 32}],
    },
    {"model": _PRESETS, "device": _FEW, "ctx": ["2k", "32k"], "batch-invariant": True},
    {"model": _PRESETS, "device": "rtx-4090", "ctx": "32k", "more": [{"dtype": "float32"}, {"rope-scaling": "yarn:4"}]},
    {"model": _BLOCKWISE, "device": _FEW, "ctx": ["4k", "64k"], "attention": _SPARSE},
    {
        "model": _BLOCKWISE, "device": _FEW[1:], "ctx": ["4k", "64k"], "block-cache": [None, "dc", "dc+"],
        "eviction": ["focus", "focus-public", "focus:keep=4"],
    },
    {"model": _BLOCKWISE, "device": "h100", "seq-lens": "4k,8k,600", "eviction": ["focus", "focus:alpha=1.2"]},
    {
        "model": _BLOCKWISE, "device": _FEW[1:], "ctx": ["4k", "64k"], "attention": ["mage", "quest"],
        "eviction": "focus", "block-cache": [None, "dc"],
    },
    {
        "model": _BLOCKWISE, "device": "rtx-4090", "ctx": "64k", "attention": ["mage", "flashblock"],
        "more": [{"batch-invariant": True}, {"budget": "9GiB", "host-budget": "32GiB"}],
    },
)  # fmt: skip
"""Products of options of `mosaic plan`, as for `GRIDS`."""


def record_plans(sample: int | None) -> dict[str, Record]:
    """The output of `mosaic plan --json` for every case, or for a sample."""
    cases = [[f"--{key}{'' if value is True else f'={value}'}" for key, value in p.items()] for p in all_plans()]
    return {" ".join(case): planned(case) for case in told(some(cases, sample), "plans")}


def all_plans() -> Iterator[Options]:
    """Every combination of every grid."""
    for grid in PLANS:
        yield from points(grid)


def planned(arguments: Sequence[str]) -> Record:
    """Figures and configuration of one plan: bytes, ms and contexts, of its steps and graphs too."""
    from typer.testing import CliRunner

    from mosaic import MosaicError
    from mosaic.cli import app

    result = CliRunner().invoke(app, ["plan", "--json", *arguments])
    if isinstance(result.exception, MosaicError):
        return {"outcome": "refused", "refused": refusal(result.exception)}
    if result.exit_code not in (0, 3):
        raise RuntimeError(f"mosaic plan {' '.join(arguments)}: {result.output}") from result.exception
    document = json.loads(result.stdout)
    names = ("total_bytes", "peak_bytes", "host_bytes", "predicted_step_ms", "max_ctx_tokens")
    figures = {name: document[name] for name in names}
    for part, entries in {**document.get("steps", {}), **document.get("graphs", {})}.items():
        figures |= {f"{part}: {name}": value for name, value in entries.items() if name.endswith(("_ms", "_bytes"))}
    if not document["fits"]:
        figures["smallest_budget_bytes"] = document["misfit"]["smallest_budget_bytes"]
    chosen = {"config": document["config"], "implementations": document["implementations"]}
    return {"outcome": "fits" if document["fits"] else "does not fit", "figures": figures, **chosen}


# --- both -------------------------------------------------------------------------------------------------------------


def refusal(error: Exception) -> str:
    """An error's type and the numbers in its message, which may be worded anew."""
    return " ".join([type(error).__name__, *re.findall(r"\d[\d,.]*\d|\d", str(error))])


def some(cases: Sequence[T], sample: int | None) -> list[T]:
    """All, or as many drawn at random, the same ones every time, in their order."""
    drawn = range(len(cases)) if sample is None else random.Random(0).sample(range(len(cases)), min(sample, len(cases)))
    return [cases[place] for place in sorted(drawn)]


def told(cases: Sequence[T], what: str) -> Iterator[T]:
    """The cases; how far they are, and how long they took, goes to stderr."""
    began = time.perf_counter()
    for done, case in enumerate(cases):
        if done % 100 == 0:
            print(f"{what}: {done:,} of {len(cases):,}, {time.perf_counter() - began:.0f} s", file=sys.stderr)
        yield case
    print(f"{what}: {len(cases):,} in {time.perf_counter() - began:.0f} s", file=sys.stderr)


class Comparison(NamedTuple):
    """Lines about cases that changed, and how many there are in both records."""

    worse: list[str]
    better: list[str]
    changed: list[str]
    equal: int
    cases: int


_OUTCOMES: Final = ("fits", "does not fit", "refused")
_ROUNDING: Final = 1e-6
"""Milliseconds are written with six decimals."""


def compare_tokens(before: Mapping[str, Record], after: Mapping[str, Record]) -> Comparison:
    """Every case that both have; other tokens, other numbers of steps and other refusals are all worse."""
    both = [name for name in before if name in after]
    worse = []
    for name in both:
        others = [what for what in ("refused", "tokens", "steps") if before[name].get(what) != after[name].get(what)]
        if others:
            worse.append(f"{name}: other {', '.join(others)}: {before[name]} -> {after[name]}")
    return Comparison(worse, [], [], len(both) - len(worse), len(both))


def compare_plans(before: Mapping[str, Record], after: Mapping[str, Record]) -> Comparison:
    """Every case that both have; a plan may be worse in one figure and better in another."""
    both = [name for name in before if name in after]
    found = Comparison([], [], [], sum(before[name] == after[name] for name in both), len(both))
    for name in both:
        old, new = before[name], after[name]
        worse, better = list[str](), list[str]()
        if old["outcome"] != new["outcome"]:
            fell = _OUTCOMES.index(new["outcome"]) > _OUTCOMES.index(old["outcome"])
            (worse if fell else better).append(f"{old['outcome']} -> {new['outcome']}")
        elif old["outcome"] != "refused":
            for figure, value in old["figures"].items():
                other = new["figures"].get(figure)
                sign = -1 if figure == "max_ctx_tokens" else 1
                if other is None or sign * (other - value) > _ROUNDING:
                    worse.append(f"{figure} {value:,} -> {other if other is None else f'{other:,}'}")
                elif sign * (value - other) > _ROUNDING:
                    better.append(f"{figure} {value:,} -> {other:,}")
        for lines, said in ((found.worse, worse), (found.better, better)):
            if said:
                lines.append(f"{name}: {'; '.join(said)}")
        if not worse and not better and old != new:
            keys = [key for key in ("refused", "config", "implementations") if old.get(key) != new.get(key)]
            found.changed.append(f"{name}: " + "; ".join(f"{key} {old.get(key)} -> {new.get(key)}" for key in keys))
    return found


def compare(before: Record, after: Record) -> tuple[list[str], bool]:
    """The lines to print, and whether no token differs and no plan is worse."""
    lines, fine = [], True
    for kind, of in (("tokens", compare_tokens), ("plans", compare_plans)):
        if kind not in before or kind not in after:
            continue
        found = of(before[kind], after[kind])
        alone = len(before[kind].keys() ^ after[kind].keys())
        lines.append(
            f"{kind}: {found.equal:,} of {found.cases:,} equal" + (f", {alone:,} in one alone" if alone else "")
        )
        for what in ("worse", "better", "changed"):
            entries: Iterable[str] = getattr(found, what)
            lines += [f"  {what}: {entry}" for entry in entries]
        fine = fine and found.cases > 0 and not found.worse
    return lines, fine and bool(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Record or compare; 1 if a token differs or a plan is worse."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.golden", description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="write the results of the imported tree")
    recording.add_argument("out", type=Path)
    recording.add_argument("--tokens", action="store_true", help="tokens, and plans only if asked for, too")
    recording.add_argument("--plans", action="store_true", help="plans, and tokens only if asked for, too")
    recording.add_argument("--sample", type=int, help="this many cases of each kind instead of all")
    comparing = commands.add_parser("compare", help="list the changes from one record to another")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    given = parser.parse_args(arguments)
    if given.command == "compare":
        lines, fine = compare(*(json.loads(file.read_text("utf-8")) for file in (given.before, given.after)))
        print("\n".join(lines))
        return 0 if fine else 1
    kinds = {"tokens": record_tokens, "plans": record_plans}
    asked = [kind for kind in kinds if getattr(given, kind)] or list(kinds)
    found = {kind: kinds[kind](given.sample) for kind in asked}
    given.out.write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
