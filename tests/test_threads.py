"""Threads within an operation: chosen by the model's size, for the time of a step, and put back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import mosaic
from mosaic.errors import UsageError
from mosaic.runtime.threads import WEIGHTS_PER_THREAD, StepThreads

CONFIG = {
    "model_type": "llada", "d_model": 32, "n_layers": 1, "n_heads": 2, "mlp_hidden_size": 48, "embedding_size": 64,
    "mask_token_id": 63, "torch_dtype": "float32",
}  # fmt: skip
IDS = torch.tensor([1, 2, 63, 63])


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


class Watch(TorchDispatchMode):
    """Notes with how many threads PyTorch runs each matrix product; the one numbered `fail` raises."""

    def __init__(self, fail: int = -1) -> None:
        super().__init__()
        self.seen: list[int] = []
        self.fail = fail

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mm" in func.__name__:
            self.seen.append(torch.get_num_threads())
            if len(self.seen) == self.fail:
                raise KeyboardInterrupt
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("asked", "expected"), [(None, 1), (1, 1), (2, 2), (np.int64(2), 2)])
def test_a_step_runs_with_the_threads_it_was_given(three_threads: None, asked: Any, expected: int) -> None:
    with mosaic.compile(CONFIG, threads=asked) as model:
        for _ in range(2):
            with Watch() as watch:
                model(IDS)
            assert len(watch.seen) > 5 and set(watch.seen) == {expected} and torch.get_num_threads() == 3
        with Watch() as watch:
            model.generate([IDS[:2]], gen_length=4)
        assert len(watch.seen) > 5 and set(watch.seen) == {expected} and torch.get_num_threads() == 3


def test_an_interrupted_step_leaves_pytorch_as_it_was(three_threads: None) -> None:
    with mosaic.compile(CONFIG) as model:
        with pytest.raises(KeyboardInterrupt), Watch(fail=3):
            model(IDS)
        assert torch.get_num_threads() == 3


@pytest.mark.parametrize(
    ("weights", "expected"),
    [(1, 1), (WEIGHTS_PER_THREAD, 1), (WEIGHTS_PER_THREAD + 1, 2), (3 * WEIGHTS_PER_THREAD, 3), (8 * 10**9, 3)],
)
def test_threads_grow_with_the_model_up_to_what_pytorch_is_set_to(
    three_threads: None, weights: int, expected: int
) -> None:
    with StepThreads(weights).in_force():
        assert torch.get_num_threads() == expected
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("asked", [0, -1, True, 1.5, "2", 10**9])
def test_what_is_no_number_of_threads_is_refused(asked: Any) -> None:
    with pytest.raises(UsageError, match="threads must be between 1 and the"):
        mosaic.compile(CONFIG, threads=asked)
