"""The decoding algorithms by name: how to decode one request, and its largest steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Final

from mosaic.decoding import block_diffusion, block_editing, dream, fast_dllm, fast_dllm_v2, llada
from mosaic.decoding.algorithm import Algorithm
from mosaic.decoding.config import ALGORITHMS, GenerationConfig, resolve
from mosaic.decoding.rows import OF_TABLE, TableRow
from mosaic.errors import UsageError
from mosaic.models.architecture import Architecture
from mosaic.models.parts import CANVAS, Commit
from mosaic.models.policies.policy import BlockStep
from mosaic.models.policies.registry import policies_of
from mosaic.models.policies.sparse_keys import SparseKeys
from mosaic.models.step import StepSize, bucket
from mosaic.registrar.request_table import BY_BLOCKS, STOPS
from mosaic.runtime.sharing import SharedSizes

if TYPE_CHECKING:
    from mosaic.runtime.request_table import RequestTable
    from mosaic.runtime.steps import StepRunner

__all__ = [
    "algorithm_of",
    "canvas_length",
    "decides_by_probability",
    "expected_steps",
    "largest_steps",
    "longest_row",
    "repeated_steps",
    "shapes",
    "shared_sizes",
    "table_row",
]


_MODULES: Final[Mapping[str, ModuleType]] = {
    "llada": llada, "dream": dream, "fast-dllm": fast_dllm, "sdar": block_diffusion, "fast-dllm-v2": fast_dllm_v2,
    "llada2": block_diffusion, "llada2.1": block_editing,
}  # fmt: skip
_ALGORITHMS: Final[Mapping[str, Algorithm]] = {
    name: Algorithm(
        name=name, decode=module.decode, shapes=module.shapes, row=getattr(module, "row", None), traits=ALGORITHMS[name]
    )
    for name, module in _MODULES.items()
}


def algorithm_of(config: GenerationConfig) -> Algorithm:
    """Return the algorithm of a resolved config. LLaDA's schedule with a cache is Fast-dLLM without a threshold."""
    if isinstance(config.algorithm, Algorithm):
        return config.algorithm
    name = str(config.algorithm or "llada")
    return _ALGORITHMS["fast-dllm" if config.cache and name == "llada" else name]


def table_row(
    config: GenerationConfig, architecture: Architecture, prompt_len: int, request_id: int, streamed: bool = False
) -> TableRow | None:
    """Return what a table on the device has to know of a request, options resolved; None if a generator decodes it.

    It does if the algorithm does not say, requests of a table cannot have one of the policies (`Policy.of_table`), keys are seen by
    ranges, or there are more tokens that stop an answer than a table has room for; and with sparse keys where weights are
    `streamed`: which of them are is then chosen for all steps of a generation.
    """
    describe = algorithm_of(config).row
    ranged = bool(architecture.windows) or architecture.rotary.kind == "dynamic"
    if describe is None or ranged or len(architecture.eos_token_ids) > STOPS:
        return None
    found = describe(config, architecture, prompt_len, request_id)
    return None if found is None or (streamed and found.sparse) else _with_policies(found, config, architecture)


def longest_row(runner: StepRunner, table: RequestTable | None, config: GenerationConfig, tokens: int) -> TableRow:
    """Return what a table has to know of a request of some options that has so many positions at most, its policies decided on.

    Raises
    ------
    UsageError
        If the answer alone is longer, or such requests are generators.
    """
    arch, found = runner.architecture, resolve(config, runner.architecture)
    block = max(found.block_length or 1, arch.block)
    prompt = tokens // block * block - found.gen_length
    if prompt < 1:
        raise UsageError(
            f"tokens: a request with gen_length {found.gen_length:,} takes more than {tokens:,} positions."
        )
    row = None if table is None else table_row(found, arch, prompt, 0, table.streams_weights)
    if row is None:
        raise UsageError("warm: requests of these options are generators, whose steps are planned as they come.")
    for expected in expected_steps(found, arch, prompt):
        runner.pays(expected)
    return row


def _with_policies(row: TableRow, config: GenerationConfig, architecture: Architecture) -> TableRow | None:
    """The same with the kind of step that its policies make, if requests of a table can have all of them."""
    policies = policies_of(config, architecture, row.length)
    if not policies:
        return row
    phase, marks, end = row.phase, 0, row.start + row.block
    step = BlockStep(
        start=row.start, end=end, number=0, steps=config.steps or row.block, window=(row.start, end), prefix=row.prefix
    )
    # where steps of blocks write a block, they attend exactly
    able = row.sparse is not None or (row.window == BY_BLOCKS and not row.shifted)
    for policy in policies:
        found = policy.of_table(phase, step) if able else None
        if found is None:
            return None
        phase, marks = found[0], marks | found[1]
    return row._replace(cache=phase.cache, cut=phase.cut, marks=marks)


def canvas_length(config: GenerationConfig, architecture: Architecture, prompt_len: int) -> int:
    """Return the positions of a request's canvas: whole blocks where the model attends by blocks."""
    block = architecture.block or 1
    return -(-(prompt_len + config.gen_length) // block) * block


def shapes(
    config: GenerationConfig,
    prompt_lens: Sequence[int],
    architecture: Architecture,
    request_ids: Sequence[int] | None = None,
) -> list[StepSize]:
    """Give the largest steps of a whole generation: none of its steps takes more memory than the largest of them.

    Examples
    --------
    >>> from mosaic.models import load
    >>> config = GenerationConfig(gen_length=64, block_length=32)
    >>> [(size.windows, size.rows) for size in shapes(config, [100, 7], load("llada-8b").architecture)]
    [((164, 71), 64)]
    """
    found = resolve(config, architecture)
    asked = range(len(prompt_lens)) if request_ids is None else request_ids
    each = [
        largest_steps(found, architecture, length, number) for length, number in zip(prompt_lens, asked, strict=True)
    ]
    for sizes, length, number in zip(each, prompt_lens, asked, strict=True):
        row = table_row(found, architecture, length, number)
        if row is not None:
            taken = {CANVAS: row.length + len(row.schedule), **OF_TABLE}
            sizes[:] = [replace(size, states={**size.states, **taken}) for size in sizes]
    return shared_sizes(each)


def largest_steps(
    config: GenerationConfig, architecture: Architecture, prompt_len: int, request_id: int
) -> list[StepSize]:
    """Return the largest steps of one request, options resolved, with the rows of states that it takes until its end."""
    canvas = canvas_length(config, architecture, prompt_len)
    sizes = algorithm_of(config).shapes(config, architecture, prompt_len, request_id)
    return [_of_canvas(size, canvas) for size in sizes if size is not None]


def decides_by_probability(config: GenerationConfig, architecture: Architecture) -> bool:
    """Return whether tokens are committed by their probabilities, options resolved: then a `confidence` is one."""
    rules = [size.phase.commit for size in largest_steps(config, architecture, 1, 0)]
    return all(rule.score == "confidence" and not rule.perturb for rule in rules if isinstance(rule, Commit))


def expected_steps(config: GenerationConfig, architecture: Architecture, prompt_len: int) -> Iterator[StepSize]:
    """Give the cut steps of one block of as many requests as an eviction expects: for a canvas that is rounded up to a power of
    two, so that whether cutting pays is found out for few, and for half as long ones."""
    canvas = bucket(canvas_length(config, architecture, prompt_len), share=1)
    while config.eviction is not None and canvas > config.gen_length:
        size = _expected_step(config, architecture, canvas - config.gen_length)
        if size is None:
            return
        yield size
        canvas //= 2


@lru_cache(maxsize=256)
def _expected_step(config: GenerationConfig, architecture: Architecture, prompt_len: int) -> StepSize | None:
    size, block = largest_steps(config, architecture, prompt_len, 0)[-1], config.block_length or 1
    count, keys = size.phase.cut.expects if size.phase.cut is not None else 0, bucket(size.keys[-1], share=1)
    if not count:
        return None
    return replace(
        size, windows=(block,) * count, keys=(keys,) * count, owned=(max(keys, *size.owned),) * count, extents=0,
        rows=min(size.rows, block) * count, states={},
    )  # fmt: skip


def repeated_steps(
    config: GenerationConfig, largest: Sequence[StepSize]
) -> tuple[dict[str, StepSize], dict[str, int]] | None:
    """Return the steps of one generator with sparse keys by name, and how often each runs; None for other requests."""
    if not (isinstance(config.cache, SparseKeys) and largest):
        return None
    times = config.cache.times(config.gen_length, config.block_length or 1)
    found = {size.phase.cache.label or "full": size for size in reversed(largest)}
    return found, times


def _of_canvas(size: StepSize, length: int) -> StepSize:
    """The same step of a sequence that has rows for its whole canvas."""
    cache = size.phase.cache
    rows = cache.rows((length,))
    if cache.kept is None or not cache.by_position or (size.owned == (length,) and rows.items() <= size.states.items()):
        return size
    return replace(size, owned=(length,), states={**size.states, **rows})


def shared_sizes(requests: Sequence[Sequence[StepSize]]) -> list[StepSize]:
    """Return the largest steps that requests may come to share, given the largest steps of each: as for `SharedSizes`."""
    return SharedSizes().beside(requests)
