"""The map of a pool at its true size: it fits a screen of 80 columns, counts every page, and hides no alarm."""

from __future__ import annotations

import numpy as np
import pytest

from kvmanager.command.mapscreen import LINE, LINES_MOST, map_screen, scale
from kvmanager.errors import InvalidArgument
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.wire import pack_u32

SEED = 9
PAGES = 19_617  # one rank's 64 GiB share in whole pages


def reply_of(states: np.ndarray, classes: np.ndarray | None = None, pins: np.ndarray | None = None) -> pb.MapReply:
    count = len(states)
    classes = np.where(states == 0, 255, 0) if classes is None else classes
    return pb.MapReply(
        pool="prefill/hbm", states=states.astype(np.uint8).tobytes(), classes=classes.astype(np.uint8).tobytes(),
        class_names=["kv", "draft"], pins=pack_u32(np.zeros(count, int) if pins is None else pins),
    )  # fmt: skip


def lines_of(reply: pb.MapReply, first: int = 0, count: int = 0) -> list[str]:
    return map_screen(reply, first, count).plain.splitlines()


def counted(lines: list[str]) -> dict[str, int]:
    legend = lines[lines.index("") + 1 :] if "" in lines else []
    return {line[5 + 8 :].strip(): int(line[5 : 5 + 8].replace(",", "")) for line in legend}


@pytest.mark.parametrize("units", [0, 1, 64, 2048, 2049, 4096, PAGES, 153_391, 1_000_000])
def test_any_size_fits_a_screen(units: int) -> None:
    rng = np.random.default_rng(SEED)
    states = rng.choice([0, 3], units)
    pins = rng.integers(0, 2, units)
    lines = lines_of(reply_of(states, pins=pins))
    assert max(map(len, lines)) <= 80
    assert len(lines) <= LINES_MOST + 10
    wanted = {"free": int((states == 0).sum()), "ready, kv": int(((states == 3) & (pins == 0)).sum()),
              "ready, kv, pinned": int(((states == 3) & (pins > 0)).sum())}  # fmt: skip
    assert counted(lines) == {name: count for name, count in wanted.items() if count}, f"seed {SEED}"


def test_the_scale_is_a_round_number_and_just_enough() -> None:
    assert [scale(n) for n in (0, 1, 2048, 2049, 4097, PAGES, 153_391)] == [1, 1, 1, 2, 5, 10, 100]
    for units in range(1, 300_000, 997):
        assert -(-units // scale(units)) <= LINE * LINES_MOST


@pytest.mark.parametrize(("state", "character"), [(5, "!"), (4, "d"), (1, "r"), (2, "+")])
def test_one_alarming_page_among_many_is_seen_at_its_place(state: int, character: str) -> None:
    states = np.full(PAGES, 3)
    states[12_345] = state
    lines = lines_of(reply_of(states))
    (line,) = [line for line in lines[: lines.index("")] if character in line[10:] and line[:8].strip().isdigit()]
    a_cell = scale(PAGES)
    first = int(line[:8])
    assert first + line[10:].index(character) * a_cell == 12_345 // a_cell * a_cell


def test_what_repeats_is_drawn_once_and_the_ends_stay() -> None:
    states = np.zeros(2048)
    states[1000] = 3
    lines = lines_of(reply_of(states))
    drawn = lines[1 : lines.index("")]
    assert [line.split()[0] for line in drawn] == ["0", "*", "896", "960", "1024", "*", "1984"]
    assert drawn[3] == f"{960:>8}  " + "." * 40 + "k" + "." * 23


def test_a_part_is_drawn_page_by_page() -> None:
    states = np.zeros(PAGES)
    states[15_001] = 5
    lines = lines_of(reply_of(states), 15_000, 100)
    assert lines[0] == "pool prefill/hbm: 19,617 units, 15,000 to 15,099 of them"
    assert lines[1] == f"{15_000:>8}  .!" + "." * 62
    assert counted(lines) == {"free": 99, "quarantined": 1}
    assert lines_of(reply_of(states), 19_616)[1] == f"{19_616:>8}  ."
    with pytest.raises(InvalidArgument, match="units 0 to 19616, not 19617"):
        map_screen(reply_of(states), PAGES)


def test_a_character_is_what_most_of_its_pages_are() -> None:
    states = np.tile([3, 3, 3, 0, 0], 1000)
    assert set("".join(line[10:] for line in lines_of(reply_of(states))[3:] if line[:8].strip().isdigit())) == {"k"}
