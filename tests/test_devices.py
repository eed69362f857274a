"""Device profiles: what they hold, what they refuse, and their TOML both ways."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from operator_tables import attention_options

from mosaic.devices import ANY_COLUMNS, DEVICES, Device, load_device, to_toml
from mosaic.errors import UsageError

CARD = DEVICES["rtx-4090"]


@pytest.mark.parametrize("name", sorted(DEVICES))
def test_every_built_in_profile_survives_its_toml(name: str, tmp_path: Path) -> None:
    file = tmp_path / "card.toml"
    file.write_text(to_toml(DEVICES[name]))
    assert load_device(str(file)) == DEVICES[name]


def test_text_with_quotes_and_control_characters_survives_too(tmp_path: Path) -> None:
    odd = replace(CARD, name='a "card"\\', source="line\nand tab\t, delete \x7f, umlaut ü")
    (tmp_path / "card.toml").write_text(to_toml(odd), encoding="utf-8")
    assert load_device(str(tmp_path / "card.toml")) == odd


@pytest.mark.parametrize("name", sorted(DEVICES))
def test_every_built_in_profile_has_rates_for_what_is_legal(name: str) -> None:
    device = DEVICES[name]
    options = attention_options(device.backend, seqs=1, head_size=128, dtype="bfloat16")
    assert list(device.attention_rates) == (sorted(options) or [device.backend])
    for rates in (*device.gemm_rates.values(), *device.attention_rates.values(), device.unembed_rates):
        assert list(rates) == sorted(rates)
    if options:
        best = {option: max(device.attention_rates[option].values()) for option in options}
        assert best["cudnn"] > best["triton"]


def test_rates_are_sorted_and_by_rows_alone_mean_any_columns() -> None:
    assert replace(CARD, gemm_rates={64: 2e12, 16: 1e12}).gemm_rates == {ANY_COLUMNS: {16: 1e12, 64: 2e12}}
    nested = replace(CARD, gemm_rates={512: {64: 2e12, 16: 1e12}, 32: {8: 1e12}}).gemm_rates
    assert list(nested) == [32, 512] and list(nested[512]) == [16, 64]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"memory_bytes": 0}, "memory_bytes must be a positive number of bytes, got 0"),
        ({"memory_bytes": 1.5e9}, "memory_bytes must be a positive number of bytes"),
        ({"memory_bytes": 1 << 20}, "is not more than context and libraries take"),
        ({"bandwidth": float("nan")}, "bandwidth must be positive bytes per second, got nan"),
        ({"bandwidth": "1 TB/s"}, "bandwidth must be positive bytes per second, got '1 TB/s'"),
        ({"host_link": float("inf")}, "host_link must be positive"),
        ({"host_bytes": -1}, "host_bytes must be a number of bytes from 0, got -1"),
        ({"launch_s": -1e-6}, "launch_s must be seconds from 0"),
        ({"page_bytes": 3000}, "page_bytes must be a power of two, got 3000"),
        ({"backend": "cudda"}, "unknown backend 'cudda'. Did you mean 'cuda'?"),
        ({"gemm_rates": {}}, "gemm_rates must map columns to {rows: FLOP/s}, or rows to FLOP/s, got {}"),
        ({"gemm_rates": 1e12}, "gemm_rates must map columns"),
        ({"gemm_rates": {64: 1e12, 4096: {64: 1e12}}}, "gemm_rates must map columns"),
        ({"gemm_rates": {4096: {}}}, "gemm_rates must have a rate for every number of columns"),
        ({"gemm_rates": {4096: {64: 0.0}}}, "gemm_rates[4096][64] must be positive FLOP/s, got 0.0"),
        ({"gemm_rates": {4096: {0: 1e12}}}, "gemm_rates[4096] must be by positive integers, got the key 0"),
        ({"gemm_rates": {"wide": {64: 1e12}}}, "gemm_rates must be by positive integers, got the key 'wide'"),
        ({"unembed_rates": {64: "fast"}}, "unembed_rates[64] must be positive FLOP/s, got 'fast'"),
        ({"unembed_rates": 1e12}, "unembed_rates must map rows to FLOP/s, got 1000000000000.0"),
        ({"attention_rates": {}}, "attention_rates must map an implementation (cudnn, triton)"),
        ({"attention_rates": {"triton": {}}}, "attention_rates must map an implementation"),
        ({"attention_rates": {"triton": 1e12}}, "attention_rates.triton must map query rows times heads to FLOP/s"),
        ({"attention_rates": {"triton": {64: -1.0}}}, "attention_rates.triton[64] must be positive"),
        (
            {"attention_rates": {"cuddn": {64: 1e12}}},
            "unknown implementation of attention 'cuddn'. Did you mean 'cudnn'?",
        ),
    ],
)
def test_what_a_profile_cannot_be(changed: Mapping[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as refused:
        replace(CARD, **changed)
    assert message in str(refused.value) and CARD.name in str(refused.value)


def from_toml(folder: Path, text: str) -> Device:
    (folder / "mine.toml").write_text(text)
    return load_device(str(folder / "mine.toml"))


def test_a_file_says_what_differs_from_its_base(tmp_path: Path) -> None:
    device = from_toml(
        tmp_path,
        'base = "h200"\nmemory_bytes = "20GiB"\nhost_bytes = 0\nlaunch_s = 1\nestimated = true\n'
        "gemm_rates = { 64 = 1e14, 512 = 5e14 }\n[attention_rates.triton]\n65536 = 3e14\n",
    )
    h200 = DEVICES["h200"]
    assert device == replace(
        h200, name="mine", source="mine.toml", memory_bytes=20 << 30, launch_s=1, estimated=True,
        gemm_rates={ANY_COLUMNS: {64: 1e14, 512: 5e14}}, attention_rates={"triton": {65536: 3e14}},
    )  # fmt: skip
    assert device.unembed_rates == h200.unembed_rates


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("attention_rate = 1e12", "Did you mean 'attention_rates'?"),
        ('base = "h20"', "unknown base device 'h20'. Did you mean 'h200'?"),
        ('memory_bytes = "much"', "cannot read the size 'much'"),
        ("bandwidth = true", "bandwidth must be positive bytes per second, got True"),
        ("estimated = 1", "estimated must be true or false, got 1"),
        ("name = 3", "name must be text, got 3"),
        ("[gemm_rates.many]\n64 = 1e12", "gemm_rates must be by positive integers, got the key 'many'"),
        ("gemm_rates = [1]", "gemm_rates must map columns"),
        ("memory_bytes = ", "cannot read the device profile"),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        from_toml(tmp_path, text)
    assert message in str(refused.value)
    assert "mine.toml" in str(refused.value) or text.startswith("base")
