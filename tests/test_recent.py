"""The cache against a list of keys in the order of their lookups."""

from __future__ import annotations

import random

import pytest

from mosaic.runtime.recent import Recent


@pytest.mark.parametrize("seed", range(20))
def test_the_keys_that_were_asked_for_last_are_kept(seed: int) -> None:
    rng = random.Random(seed)
    dropped: list[str | None] = []
    kept: Recent[int, str | None] = Recent(most := rng.randint(1, 6), dropped.append)
    order: list[int] = []
    values: dict[int, str | None] = {}
    made = 0

    def make() -> str | None:
        nonlocal made
        made += 1
        return None if made % 5 == 0 else f"value {made}"

    for _ in range(200):
        key, before = rng.randrange(10), made
        found = kept.find(key, make)
        assert (made == before) is (key in order)
        values[key] = values[key] if key in order else found
        every = [*(other for other in order if other != key), key]
        order = every[-most:]
        assert dropped == [values[other] for other in every[:-most]]
        dropped.clear()
        assert list(kept.items()) == [(other, values[other]) for other in order] and found == values[key]


def test_what_could_not_be_made_is_not_kept() -> None:
    kept: Recent[str, int] = Recent(2)
    with pytest.raises(ZeroDivisionError):
        kept.find("a", lambda: 1 // 0)
    assert not kept and kept.find("a", lambda: 3) == 3
