"""Sizes: exact bytes in, readable text out."""

from __future__ import annotations

import pytest

from kvmanager.units import GIB, KIB, MIB, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (0, 0),
        (512, 512),
        ("512", 512),
        ("512B", 512),
        ("64 MiB", 64 * MIB),
        (" 15GiB ", 15 * GIB),
        ("2TiB", 2048 * GIB),
        ("3KiB", 3 * KIB),
    ],
)
def test_parse(text: str | int, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "1.5GiB", "64MB", "64 mib", "-1", -1, True, "GiB", "1 2"])
def test_refused(text: str | int) -> None:
    with pytest.raises(ValueError, match=r"is not a size|is negative"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("count", "expected"),
    [(0, "0 B"), (1023, "1023 B"), (KIB, "1.00 KiB"), (3_502_592, "3.34 MiB"), (64 * GIB, "64.00 GiB")],
)
def test_format(count: int, expected: str) -> None:
    assert format_bytes(count) == expected
