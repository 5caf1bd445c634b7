"""`kvmanager map`: a pool drawn page by page, or at true size many pages a character, in 80 columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from rich.text import Text

from kvmanager.command.screens import NO_CLASS, STATE_CHARACTERS, STATES, class_letters, map_units
from kvmanager.errors import InvalidArgument
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.wire import unpack_u32

LINE: Final = 64
"""Characters of a line."""
LINES_MOST: Final = 32
"""Lines before a character stands for more than one unit."""
ALARMING: Final = ("quarantined", "draining", "reserved", "filling")
"""A character that stands for many units never hides one of these; the first of them that occurs is shown."""
_READY: Final = STATES.index("ready")


@dataclass(frozen=True)
class Drawing:
    """A pool's units as kinds: `kinds[i]` of unit `first + i` is a place in `characters` and `meanings`."""

    first: int
    kinds: npt.NDArray[np.int64]
    characters: list[str]
    meanings: list[str]

    def cells(self, a_cell: int) -> npt.NDArray[np.int64]:
        """One kind for so many units each: an alarming one where it occurs, otherwise what most of them are."""
        padded = np.full(-(-len(self.kinds) // a_cell) * a_cell, len(self.characters))
        padded[: len(self.kinds)] = self.kinds
        table = padded.reshape(-1, a_cell)
        counts = np.stack([(table == kind).sum(axis=1) for kind in range(len(self.characters))], axis=1)
        found: npt.NDArray[np.int64] = counts.argmax(axis=1)
        for state in ALARMING[::-1]:
            kind = STATES.index(state)
            found[counts[:, kind] > 0] = kind
        return found


def drawing(reply: pb.MapReply, first: int = 0, count: int = 0) -> Drawing:
    """`count` units from `first` on; 0: all that follow.

    Raises DaemonError when the reply's arrays do not describe the same units, InvalidArgument for a unit beyond them.
    """
    total = len(map_units(reply))
    if not 0 <= first < max(total, 1):
        raise InvalidArgument(f"pool {reply.pool} has units 0 to {total - 1}, not {first}")
    end = min(first + count, total) if count else total
    states = np.frombuffer(reply.states, np.uint8)[first:end].astype(np.int64)
    classes = np.frombuffer(reply.classes, np.uint8)[first:end].astype(np.int64)
    pinned = unpack_u32(reply.pins, "MapReply.pins")[first:end] > 0
    characters, meanings = list(STATE_CHARACTERS), list(STATES)
    for letter, name in zip(class_letters(reply.class_names), reply.class_names, strict=True):
        characters += [letter, letter.upper()]
        meanings += [f"ready, {name}", f"ready, {name}, pinned"]
    characters += ["?", "P"]
    meanings += ["ready, no class", "ready, no class, pinned"]
    classes[classes == NO_CLASS] = len(reply.class_names)
    kinds = np.where(states == _READY, len(STATES) + 2 * classes + pinned, states)
    return Drawing(first, kinds, characters, meanings)


def scale(units: int) -> int:
    """Units a character, so that they fit `LINES_MOST` lines: 1, 2, 5, 10, 20, 50, ..."""
    power = 1
    while True:
        for step in (1, 2, 5):
            if units <= LINE * LINES_MOST * step * power:
                return step * power
        power *= 10


def map_screen(reply: pb.MapReply, first: int = 0, count: int = 0) -> Text:
    """The drawing and its legend, which counts every unit. A line that only repeats is drawn once, `*` for the rest.

    Raises as `drawing` does.
    """
    drawn = drawing(reply, first, count)
    units = len(drawn.kinds)
    a_cell = scale(units)
    text = "".join(drawn.characters[kind] for kind in drawn.cells(a_cell))
    rows = [text[at : at + LINE] for at in range(0, len(text), LINE)]
    lines: list[str] = []
    for number, row in enumerate(rows):
        if 0 < number < len(rows) - 1 and row == rows[number - 1] == rows[number + 1]:
            if lines[-1] != f"{'*':>8}":
                lines.append(f"{'*':>8}")
            continue
        lines.append(f"{drawn.first + number * LINE * a_cell:>8}  {row}")
    counts = np.bincount(drawn.kinds, minlength=len(drawn.characters))
    assert counts.sum() == units, "the legend counts every unit once"
    shown = sorted((drawn.characters[kind], int(counts[kind]), drawn.meanings[kind]) for kind in np.flatnonzero(counts))
    legend = [f"  {character}  {number:>8,}  {meaning}" for character, number, meaning in shown]
    whole = f"pool {reply.pool}: {len(reply.states):,} units"
    head = whole if units == len(reply.states) else f"{whole}, {drawn.first:,} to {drawn.first + units - 1:,} of them"
    notes = []
    if a_cell > 1:
        notes = [
            f"a character is {a_cell:,} units: what most are, or !, d, r, + where there is one;",
            "--first N --count N draws a part, one character a unit up to 2,048",
        ]
    return Text("\n".join([head, *notes, *lines, "", *legend]))
