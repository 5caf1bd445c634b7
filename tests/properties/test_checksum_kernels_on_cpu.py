"""The checksum kernels, run on the CPU thread by thread in random order, against the rule."""

from __future__ import annotations

import numpy as np
import pytest

from kvmanager.transport.checksums import LINE_WORDS, section_sum
from kvmanager.transport.cuda_checksums import _SOURCE
from tests.properties.cuda_on_cpu import CpuKernels, compiler

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler to build the kernels for the CPU")

LINE = LINE_WORDS * 8
TILE_LINES = 2
SIZES = (1, 7, 8, 655, LINE - 1, LINE, LINE + 1, 3 * LINE, 5 * LINE + 4_001)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> CpuKernels:
    folder = tmp_path_factory.mktemp("checksums")
    source = folder / "checksums.cu"
    source.write_text(_SOURCE.replace("__launch_bounds__(256, 2)\n", "__launch_bounds__(256, 2) "), encoding="utf-8")
    return CpuKernels(folder, str(source), {})


@pytest.mark.parametrize("shift", [0, 8, 5])
def test_kernels_add_up_what_the_rule_says(kernels: CpuKernels, shift: int) -> None:
    """Sections on places for wide loads, on words and between them; some end within a line, some take several tiles."""
    seed = 31 + shift
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    memory = rng.integers(0, 256, 32 * LINE, np.uint8)
    first = -int(memory.ctypes.data) % 16 + shift
    sections = []
    for size in rng.permutation(SIZES).tolist():
        sections.append(memory[first : first + size])
        first += -(-size // 16) * 16
    described = np.array([[part.ctypes.data, len(part)] for part in sections], np.uint64)
    tiles = [-(-len(part) // (TILE_LINES * LINE)) for part in sections]
    first_tile = np.array([0, *np.cumsum(tiles)], np.uint64)
    columns, sums = np.zeros((len(sections), LINE_WORDS), np.uint64), np.zeros((len(sections), 2), np.uint64)
    n = np.int32(len(sections))
    kernels.run("add_up", 3, 64, seed, described, first_tile, n, np.int32(TILE_LINES), columns, sums)
    kernels.run("mix_columns", 3, 64, seed, described, n, columns, sums)
    assert np.array_equal(sums, [section_sum(part) for part in sections])
