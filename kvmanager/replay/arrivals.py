"""Requests that come when they came, whoever answers: the published traces of Mooncake and of Azure.

Open loop, and nobody tells of sessions. Service times are not recorded there: an answer takes `TOKEN_S` a token.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvmanager.errors import InvalidArgument
from kvmanager.replay.stream import BLOCK_TOKENS, Int64Array, Request, text_of

TOKEN_S: Final = 0.02
MOONCAKE_BLOCK_TOKENS: Final = 512
_AZURE_COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True)
class Arrival:
    """One recorded request. `nodes`: int64[whole blocks of 64 tokens], equal numbers mean equal prefixes."""

    start_s: float
    nodes: Int64Array
    output_tokens: int


class OpenLoop:
    """Arrivals in order of their start, then the same again from the last one's moment on, as other requests."""

    def __init__(self, arrivals: list[Arrival]) -> None:
        """Raises InvalidArgument for none."""
        if not arrivals:
            raise InvalidArgument("no request is recorded with a prompt of a whole block")
        self._arrivals = sorted(arrivals, key=lambda arrival: arrival.start_s)
        self._taken = 0

    @property
    def next_s(self) -> float:
        """When the next request starts."""
        rounds, place = divmod(self._taken, len(self._arrivals))
        return self._arrivals[place].start_s + rounds * self._arrivals[-1].start_s

    def take(self) -> Request:
        """The next request."""
        start_s = self.next_s
        rounds, place = divmod(self._taken, len(self._arrivals))
        self._taken += 1
        arrival = self._arrivals[place]
        end_s = start_s + arrival.output_tokens * TOKEN_S
        return Request(start_s, end_s, rounds, arrival.nodes, "?", False, hints=False)

    def ended(self, request: Request, end_s: float) -> None:
        """Nobody waits for an answer."""

    def idle(self, now_s: float) -> None:
        """Pauses are as recorded."""


def load_mooncake(lines: Iterable[str]) -> Iterator[Arrival]:
    """JSON lines with timestamp (ms), input_length, output_length and hash_ids, one a block of 512 tokens.

    An id names its whole prefix. Whole blocks of 64 tokens of a prompt count. Raises KeyError, TypeError, ValueError.
    """
    part = MOONCAKE_BLOCK_TOKENS // BLOCK_TOKENS
    for line in lines:
        record: dict[str, Any] = json.loads(line)
        blocks = int(record["input_length"]) // BLOCK_TOKENS
        ids = np.asarray(record["hash_ids"], np.int64)
        if blocks > len(ids) * part:
            raise ValueError(f"{len(ids)} hash_ids for {record['input_length']} tokens")
        nodes = (ids[:, None] * part + np.arange(1, part + 1)).ravel()[:blocks]
        if blocks:
            yield Arrival(float(record["timestamp"]) / 1e3, nodes, max(int(record["output_length"]), 1))


def load_azure(lines: Iterable[str]) -> Iterator[Arrival]:
    """CSV with TIMESTAMP, ContextTokens, GeneratedTokens: arrivals and lengths; no two prompts are known to be alike.

    Raises KeyError, ValueError.
    """
    first: datetime | None = None
    made = 1
    for record in csv.DictReader(lines):
        moment_text, context, generated = (record[name] for name in _AZURE_COLUMNS)
        moment = datetime.fromisoformat(moment_text[:26])  # seven digits of a second; six are kept
        first = first or moment
        blocks = int(context) // BLOCK_TOKENS
        if blocks:
            yield Arrival((moment - first).total_seconds(), np.arange(made, made + blocks), max(int(generated), 1))
        made += blocks


def format_of(path: Path) -> Callable[[Iterable[str]], Iterator[Arrival]] | None:
    """Who reads a file of arrivals, by its first line; None for sessions. Raises InvalidArgument."""
    with text_of(path) as lines:
        first = next(iter(lines), "")
    if first.lstrip("\ufeff").startswith(_AZURE_COLUMNS[0] + ","):
        return load_azure
    try:
        record = json.loads(first)
    except ValueError:
        return None  # who reads sessions says what is wrong
    return load_mooncake if isinstance(record, dict) and "hash_ids" in record and "timestamp" in record else None


def load_arrivals(path: Path, read: Callable[[Iterable[str]], Iterator[Arrival]]) -> list[Arrival]:
    """All of a file. Raises InvalidArgument for one in another form."""
    with text_of(path) as lines:
        try:
            return list(read(lines))
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidArgument(f"{path} is no trace of this form: {error!r}") from error
