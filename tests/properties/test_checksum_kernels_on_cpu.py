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
    n, most = len(sections), len(sections) + 3
    described = np.zeros(3 * most + 1, np.uint64)
    described[: 2 * n] = np.array([[part.ctypes.data, len(part)] for part in sections]).reshape(-1)
    tiles = [-(-len(part) // (TILE_LINES * LINE)) for part in sections]
    described[2 * most : 2 * most + n + 1] = [0, *np.cumsum(tiles)]
    # What a batch before this one left behind.
    here = np.full_like(described, 7)
    columns, sums, result = (np.full(shape, 7, np.uint64) for shape in ((most, LINE_WORDS), (most, 2), (most, 2)))
    first_tile, count = here[2 * most :], np.int32(n)
    kernels.run("begin", 3, 64, seed, described, count, np.int32(most), here, columns, sums)
    kernels.run("add_up", 3, 64, seed, here, first_tile, count, np.int32(TILE_LINES), columns, sums)
    kernels.run("mix_columns", 3, 64, seed, here, count, columns, sums, result)
    assert np.array_equal(result[:n], [section_sum(part) for part in sections])
    assert (result[n:] == 7).all()
