"""The sums of page sections: against a model of single bytes, and what they find."""

import random

import numpy as np
import pytest

from kvmanager.core.checksums import SUM_WORDS, PageSections, sections_of
from kvmanager.layout import GLM53, indexer_layout, latent_layout, native_layout
from kvmanager.transport.checksums import LINE_WORDS, page_sums, section_sum, sum_pages
from kvmanager.transport.executor import RegionMap

LINE_BYTES = 8 * LINE_WORDS
SIZES = (1, 7, 8, 9, LINE_BYTES - 1, LINE_BYTES, LINE_BYTES + 1, 3 * LINE_BYTES + 1234, 40 * LINE_BYTES + 8)
_MASK = 2**64 - 1


def _mixed(value: int) -> int:
    z = (value + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def naive(data: bytes) -> tuple[int, int]:
    """The rule, byte by byte."""
    lines: dict[int, int] = {}
    columns = dict.fromkeys(range(LINE_WORDS), 0)
    for at, byte in enumerate(data):
        word, shift = divmod(at, 8)
        line, column = divmod(word, LINE_WORDS)
        lines[line] = (lines.get(line, 0) + (byte << 8 * shift)) & _MASK
        columns[column] = (columns[column] + (byte << 8 * shift)) & _MASK
    by_line = sum(_mixed((value + _mixed(line)) & _MASK) for line, value in lines.items()) + _mixed(len(data))
    by_column = sum(_mixed((value + _mixed(column)) & _MASK) for column, value in columns.items())
    return by_line & _MASK, by_column & _MASK


def some_bytes(seed: int, size: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


@pytest.mark.parametrize("size", SIZES)
def test_sums_are_those_of_the_naive_model(size: int) -> None:
    data = some_bytes(size, size)
    assert tuple(section_sum(data).tolist()) == naive(data.tobytes())
    assert tuple(section_sum(np.full(size, 255, np.uint8)).tolist()) == naive(b"\xff" * size)


def test_bytes_count_in_c_order_whatever_the_strides() -> None:
    data = some_bytes(1, 96 * 1000).reshape(96, 1000)
    for view in (data[:, 5:900], data[::3], data[::-1, ::2], data.T):
        assert section_sum(view).tolist() == section_sum(np.frombuffer(view.tobytes(), np.uint8)).tolist()
    room = some_bytes(2, 50_000)
    assert section_sum(room[3:40_003]).tolist() == section_sum(room[3:40_003].copy()).tolist(), "between two words"


def test_every_flipped_bit_is_found() -> None:
    data = some_bytes(3, LINE_BYTES + 100)
    right = section_sum(data).tolist()
    for at in {*range(0, len(data), 97), *range(LINE_BYTES - 4, len(data))}:
        for bit in range(8):
            data[at] ^= 1 << bit
            assert section_sum(data).tolist() != right, (at, bit)
            data[at] ^= 1 << bit
    assert section_sum(data).tolist() == right


@pytest.mark.parametrize("seed", range(6))
def test_what_goes_wrong_with_whole_pieces_is_found(seed: int) -> None:
    """Rows of 656 B of a page like a real one: exchanged, zeroed, moved on, repeated, taken from elsewhere."""
    draw = random.Random(seed)
    print(f"seed {seed}")
    rows, row_bytes = 600, 656
    page = some_bytes(seed, rows * row_bytes)
    if seed % 2:  # content with little in it, as real rows may be
        page[page > 8] = 0
    right = section_sum(page).tolist()

    def wrong(other: np.ndarray) -> None:
        assert np.array_equal(other, page) or section_sum(other).tolist() != right

    for _ in range(20):
        piece = draw.choice((1, 8, 64, row_bytes, 4096, LINE_BYTES, 2 * LINE_BYTES))
        first, second = (draw.randrange(len(page) - piece + 1) // piece * piece for _ in range(2))
        swapped = page.copy()
        swapped[first : first + piece], swapped[second : second + piece] = (
            page[second : second + piece].copy(), page[first : first + piece].copy(),
        )  # fmt: skip
        wrong(swapped)
        zeroed = page.copy()
        zeroed[first : first + piece] = 0
        wrong(zeroed)
        wrong(np.roll(page, piece))
        wrong(np.concatenate((page[piece:], page[:piece])))
        stale = page.copy()
        stale[first : first + piece] = some_bytes(seed + 100, piece)
        wrong(stale)
        two = page.copy()  # the top bits of two words, which plain sums modulo 2**64 don't see
        for at in (first // 8 * 8 + 7, second // 8 * 8 + 7):
            two[at] ^= 0x80
        wrong(two)


def test_length_counts() -> None:
    assert section_sum(np.zeros(8, np.uint8)).tolist() != section_sum(np.zeros(16, np.uint8)).tolist()


def test_sections_of_the_deployments_pages() -> None:
    latent, indexer = sections_of(native_layout(GLM53, 64))
    assert (latent.name, latent.start, latent.size_bytes) == ("latent", 0, GLM53.latent_page_bytes(64))
    assert (indexer.name, indexer.start) == ("indexer", GLM53.latent_page_bytes(64))
    assert indexer.start + indexer.size_bytes == GLM53.page_bytes(64)
    (alone,) = sections_of(latent_layout(GLM53, 64))
    assert (alone.name, alone.start, alone.size_bytes) == ("latent", 0, GLM53.latent_page_bytes(64))
    (keys,) = sections_of(indexer_layout(GLM53, 64))
    assert (keys.name, keys.start, keys.size_bytes) == ("indexer", 0, GLM53.indexer_page_bytes(64))


def test_each_section_of_each_page_has_its_own_sum() -> None:
    regions = RegionMap()
    memory = {region: some_bytes(region, 5000) for region in (4, 9)}
    for region, array in memory.items():
        regions.add(region, array)
    pages = PageSections(np.array([9, 4, 9], np.int32), np.array([0, 1000, 3000]), ((0, 700), (704, 96)))
    before = sum_pages(regions, pages)
    assert before.shape == (3, 2 * SUM_WORDS)
    memory[4][1000 + 704] ^= 1
    differs = sum_pages(regions, pages) != before
    assert differs[1, SUM_WORDS:].any()
    differs[1, SUM_WORDS:] = False
    assert not differs.any()
    memory[9][702] ^= 1
    assert not (sum_pages(regions, pages) != before)[[0, 2]].any(), "bytes of no section have no sum"


@pytest.mark.parametrize("size", [1, 7, 8, 8191, 8192, 8193, 3 * 8192, 40_000, 300_000])
def test_sums_of_many_pages_are_those_of_each(size: int) -> None:
    rows = np.random.default_rng(size).integers(0, 256, (9, size), dtype=np.uint8)
    pages = [3, 0, 8, 3, 5]
    expected = [section_sum(rows[page]).tolist() for page in pages]
    assert page_sums(rows, pages).tolist() == expected
    assert page_sums(rows, []).shape == (0, 2)
