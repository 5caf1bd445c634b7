"""The reference resolver against a scalar model: which row, which victim, which bytes; whatever the tables say."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmanager.clients.glm.resolver_reference import RankTables, ReferenceResolver, Resolved, copy_rows
from kvmanager.clients.glm.sparse_tables import GroupPlace, SparseShape
from kvmanager.layout import KVFormat
from tests.properties.resolver_history import ResolverHistory, places

FORMAT = KVFormat("small", ((0,), (1, 2)), latent_row_bytes=16, index_value_bytes=8, index_scale_bytes=4)
B = 4
SHAPE = SparseShape(requests=3, rows=2, topk=6, page_rows=B, hot_rows=14, most_pages=14, device_pages=48, host_pages=20)
PLACES = places(FORMAT, B)


@dataclass
class Buffer:
    """Hot rows of one request and group: keys by row, and rows by age, oldest first."""

    key_of: dict[int, int] = field(default_factory=dict)
    ages: list[int] = field(default_factory=lambda: list(range(SHAPE.hot_rows)))


class Model:
    """Walks the tables one position at a time."""

    def __init__(self) -> None:
        self.buffers = {(g, r): Buffer() for g in range(len(PLACES)) for r in range(SHAPE.requests)}
        self.counters = [[0, 0, 0, 0] for _ in range(SHAPE.requests)]

    def forget(self, request: int) -> None:
        for group in range(len(PLACES)):
            self.buffers[group, request] = Buffer()

    def find(self, tables: RankTables, request: int, position: int) -> tuple[int, int, int, int] | None:
        """(uid, slot, device, host) of a position as the tables have it."""
        segment = position // B
        if segment >= SHAPE.most_pages:
            return None
        first, segments, interleave = (int(x) for x in tables.spans[request, segment])
        if first < 0 or first > segment or segments < 1 or interleave < 1:
            return None
        page, slot, offset = 0, 0, 0
        # Round-robin by counting: `interleave` tokens to a page, then the next page.
        span_offset = position - first * B
        turns, offset = span_offset // interleave, span_offset % interleave
        page, rounds = turns % segments, turns // segments
        slot = rounds * interleave + offset
        ordinal = first + page
        if ordinal >= int(tables.page_count[request]) or slot >= B:
            return None
        uid, device, host = (int(x) for x in tables.pages[request, ordinal])
        return (uid, slot, device, host) if uid >= 0 else None

    def resolve(
        self, tables: RankTables, group: int, place: GroupPlace, topk: np.ndarray
    ) -> tuple[list[list[int]], list[list[tuple[int, int]]]]:
        """(row addresses by request, (source, target) pairs by request)."""
        all_rows, all_pairs = [], []
        for request in range(SHAPE.requests):
            rows, pairs = self.resolve_one(tables, group, place, request, topk[request].reshape(-1).tolist())
            all_rows.append(rows)
            all_pairs.append(pairs)
        return all_rows, all_pairs

    def resolve_one(
        self, tables: RankTables, group: int, place: GroupPlace, request: int, flat: list[int]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        buffer, count = self.buffers[group, request], self.counters[request]
        slabs = [int(page) for page in tables.hot_pages[request]]
        whole = all(0 <= page < SHAPE.device_pages for page in slabs)

        def address(page: int, slot: int) -> int:
            return page * place.page_bytes + place.offset + slot * place.row_bytes

        found = [self.find(tables, request, p) if p >= 0 else None for p in flat]
        away = [f for f in found if f and not 0 <= f[2] < SHAPE.device_pages]
        wanted = {f[0] * B + f[1] for f in away}
        row_of = {key: row for row, key in buffer.key_of.items() if key in wanted} if whole else {}
        hits = set(row_of.values())
        count[1] += len(hits)
        pairs, fresh, lost = [], [], set()
        for uid, slot, _, host in away if whole else []:
            key = uid * B + slot
            if key in row_of or key in lost:
                continue
            if not 0 <= host < SHAPE.host_pages:
                lost.add(key)
                continue
            row = next(r for r in buffer.ages if r not in hits and r not in fresh)
            fresh.append(row)
            row_of[key] = row
            pairs.append((address(host, slot), address(slabs[row // B], row % B)))
        for key, row in row_of.items():
            buffer.key_of[row] = key
        old = [r for r in buffer.ages if r not in hits and r not in fresh]
        buffer.ages = old + fresh + [r for r in buffer.ages if r in hits]
        count[2] += len(fresh)
        rows = []
        for position, f in zip(flat, found, strict=True):
            row = -1
            if f and 0 <= f[2] < SHAPE.device_pages:
                row = address(f[2], f[1])
                count[0] += 1
            elif f and (hot := row_of.get(f[0] * B + f[1])) is not None:
                row = address(slabs[hot // B], hot % B)
            if row < 0 and position >= 0:
                count[3] += 1
            rows.append(row)
        return rows, pairs


class Run:
    """A history with the reference and the model side by side."""

    def __init__(self, seed: int) -> None:
        self.history = ResolverHistory(seed, SHAPE, PLACES[0].page_bytes)
        self.reference = ReferenceResolver(SHAPE, PLACES)
        self.reference.tables = self.history.tables
        self.model = Model()
        for request, slabs in self.history.first_buffers():
            self.set_buffer(request, slabs)

    def set_buffer(self, request: int, slabs: np.ndarray | None) -> None:
        self.reference.set_hot_pages(request, slabs)
        self.model.forget(request)

    def step(self) -> None:
        changed = self.history.change()
        if changed is not None:
            self.set_buffer(*changed)
        group = int(self.history.rng.integers(len(PLACES)))
        topk = self.history.topk(reach=0.4)
        rows, pairs = self.model.resolve(self.history.tables, group, PLACES[group], topk)
        resolved = self.reference.resolve(group, topk)
        assert resolved.rows.reshape(SHAPE.requests, -1).tolist() == rows
        got = [
            list(zip(s.tolist(), t.tolist(), strict=True))
            for s, t in zip(resolved.miss_source, resolved.miss_target, strict=True)
        ]
        assert got == pairs
        for request in range(SHAPE.requests):
            assert self.reference.lru[group, request].tolist() == self.model.buffers[group, request].ages
        assert self.reference.counters.tolist() == self.model.counters
        self.check_bytes(group, topk, resolved)

    def check_bytes(self, group: int, topk: np.ndarray, resolved: Resolved) -> None:
        """After the swap-in every row that was given holds the bytes of its page's content."""
        place = PLACES[group]
        device = self.history.device.reshape(-1)
        copy_rows(self.history.host.reshape(-1), device, resolved, place.row_bytes)
        for request in range(SHAPE.requests):
            flat = zip(topk[request].reshape(-1).tolist(), resolved.rows[request].reshape(-1).tolist(), strict=True)
            for position, row in flat:
                if row < 0:
                    continue
                found = self.model.find(self.history.tables, request, position)
                assert found is not None
                at = place.offset + found[1] * place.row_bytes
                expected = self.history.content(found[0])[at : at + place.row_bytes]
                assert device[row : row + place.row_bytes].tobytes() == expected.tobytes()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), steps=st.integers(1, 40))
def test_reference_does_what_the_model_does(seed: int, steps: int) -> None:
    run = Run(seed)
    for _ in range(steps):
        run.step()


def test_histories_reach_every_case() -> None:
    """Without hits, misses, resident and unreadable entries the property above would say nothing."""
    seed = 3
    print(f"seed {seed}")
    run = Run(seed)
    for _ in range(120):
        run.step()
    assert np.array(run.model.counters).sum(axis=0).min() > 100, run.model.counters
