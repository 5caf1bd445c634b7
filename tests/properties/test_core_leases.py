"""Engines with memory of their own against a naive model: any order of reads, writes, ends, deaths and failures."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvmanager.core.events import DetachRank, EngineGone, Opened, Tick, TimelinesRead
from kvmanager.core.leaseevents import AcquirePrefix, EndLease, ReserveSpans
from kvmanager.core.node import Node
from kvmanager.core.pool import PageState
from kvmanager.core.spec import ChainSpec, GroupSpec, Limits, PageClass, Placement, PoolSpec
from kvmanager.errors import KVError, PoolExhausted
from kvmanager.geometry import SEQUENTIAL
from kvmanager.layout import plain_format, plain_layout
from tests.properties.core_model import chained
from tests.sim.driver import Client, Driver, nothing_held, pages_of

ROWS, PAGES, RANKS, TTL = 4, 7, 2, 1_000_000
Words = tuple[int, ...]
FORMAT = plain_format("float32", 2, 2, 8)
PROMPTS = st.tuples(st.sampled_from([0, 1, 2, 6]), st.integers(1, 6)).map(
    lambda drawn: ((0,) * drawn[0] + (1,) * 6)[: drawn[1]]
)


def cache_group() -> GroupSpec:
    layout = plain_layout(FORMAT, ROWS)
    kv = PageClass("kv", layout, "c/host", tuple(range(RANKS)))
    chain = ChainSpec("main", Placement.REPLICATED, RANKS, ROWS, SEQUENTIAL, SEQUENTIAL, (kv,))
    pool = PoolSpec("c/host", "host", RANKS, PAGES, layout.page_bytes, (("kv", 1),))
    return GroupSpec("c", RANKS, ROWS, FORMAT, (chain,), (pool,))


@dataclass
class Reading:
    """A lease on pages that hold the first words of `words`."""

    words: Words
    pages: list[int]


@dataclass
class Writing:
    """A lease to fill pages for words [known, known + len(pages)). `told`: its commit was sent with that value."""

    words: Words
    known: int
    pages: list[int]
    filled: int = 0


@dataclass
class Party:
    """An engine: what it holds, and what its ranks have queued (value -> what becomes true then)."""

    client: Client
    reading: dict[int, Reading] = field(default_factory=dict)
    writing: dict[int, Writing] = field(default_factory=dict)
    queued: list[tuple[int, int, Words]] = field(default_factory=list)  # value, page, what it holds then
    ends: list[tuple[int, int, object]] = field(default_factory=list)  # value, lease, Writing committed or None


class LeaseMachine(RuleBasedStateMachine):
    """`held[page]`: what its bytes are, by the writes that ran. `believed`: prefixes whose commits are fenced."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver([cache_group()], Limits(ticket_grace_ns=1_000))
        self.parties = [self.join(name) for name in ("a", "b")]
        self.held: dict[int, Words] = {}
        self.believed: set[Words] = set()
        self.next_id = 1

    def join(self, name: str) -> Party:
        return Party(Client(self.driver, "c", name))

    def lease_id(self) -> int:
        self.next_id += 1
        return self.next_id

    # ------------------------------------------------------------------------------- rules

    @rule(who=st.integers(0, 1), words=PROMPTS, again=st.booleans())
    def acquire(self, who: int, words: Words, again: bool) -> None:
        party = self.parties[who]
        event = AcquirePrefix(party.client.name, party.client.epoch, self.lease_id(), chained(words), TTL)
        answer = self.driver.apply(event)
        assert isinstance(answer, Opened)
        found = answer.cached_tokens // ROWS
        assert all(words[:n] in self.believed for n in range(1, found + 1)), "read what nobody is known to have written"
        pages = pages_of(answer) if found else []
        assert len(pages) == found
        assert [self.held[page] for page in pages] == [words[: n + 1] for n in range(found)]
        if found:
            party.reading[event.request_id] = Reading(words, pages)
            if again:
                resent = self.driver.apply(event)
                assert isinstance(resent, Opened)
                assert pages_of(resent) == pages

    @rule(who=st.integers(0, 1), words=PROMPTS, again=st.booleans())
    def reserve(self, who: int, words: Words, again: bool) -> None:
        party = self.parties[who]
        room = self.driver.pool("c/host").free_slabs
        event = ReserveSpans(party.client.name, party.client.epoch, self.lease_id(), chained(words), TTL, f"s{who}")
        answer = self.driver.apply(event)
        if isinstance(answer, KVError):
            assert isinstance(answer, PoolExhausted), answer
            assert room < len(words), "refused although all of it was free"
            return
        assert isinstance(answer, Opened)
        known = answer.cached_tokens // ROWS
        pages = pages_of(answer) if answer.spans else []
        assert known + len(pages) == len(words) or room < len(words), "cut short although all of it was free"
        for page in pages:
            assert not any(page in r.pages for p in self.parties for r in p.reading.values()), "given while it is read"
            assert not any(page in w.pages for p in self.parties for w in p.writing.values()), "given twice"
            self.held[page] = ()
        party.writing[event.request_id] = Writing(words, known, pages)
        if again:
            resent = self.driver.apply(event)
            assert isinstance(resent, Opened)
            assert (pages_of(resent) if resent.spans else []) == pages

    @precondition(lambda self: any(p.writing for p in self.parties))
    @rule(data=st.data(), commit=st.integers(0, 3))
    def fill_and_end(self, data: st.DataObject, commit: int) -> None:
        """The ranks are told to copy, and the scheduler says at once that it is committed (or aborted) behind that."""
        party = data.draw(st.sampled_from([p for p in self.parties if p.writing]))
        lease = data.draw(st.sampled_from(sorted(party.writing)))
        written = data.draw(st.integers(0, len(party.writing[lease].pages)))
        self._fill_and_end(party, lease, commit=commit > 0, written=written)

    @rule(who=st.integers(0, 1), words=PROMPTS)
    def store(self, who: int, words: Words) -> None:
        """All steps of a write, one after the other."""
        party = self.parties[who]
        self.reserve(who, words, again=False)
        if self.next_id in party.writing:
            self._fill_and_end(party, self.next_id, commit=True)
            self.all_ranks_run(who)

    def _fill_and_end(self, party: Party, lease: int, *, commit: bool, written: int | None = None) -> None:
        """`written`: how many of the pages are filled; None: all."""
        writing = party.writing[lease]
        if not any(lease == ended for _, ended, _ in party.ends):
            writing.filled = len(writing.pages) if written is None else written
        client = party.client
        client.value += 1
        for place, page in enumerate(writing.pages[: writing.filled]):
            party.queued.append((client.value, page, writing.words[: writing.known + place + 1]))
        fence = dict.fromkeys(client.attaches, client.value)
        tokens = (writing.known + writing.filled) * ROWS
        commit &= tokens > 0
        event = EndLease(client.name, client.epoch, lease, fence, committed=commit, committed_tokens=tokens)
        assert self.driver.apply(event) is None
        assert self.driver.apply(event) is None or not client.attaches, "said again, it is no error until it has ended"
        party.ends.append((client.value, lease, writing if commit else None))

    @precondition(lambda self: any(p.reading for p in self.parties))
    @rule(data=st.data(), how=st.sampled_from(["done", "fenced", "failed"]))
    def read(self, data: st.DataObject, how: str) -> None:
        party = data.draw(st.sampled_from([p for p in self.parties if p.reading]))
        ended = {lease for _, lease, _ in party.ends}
        open_ones = sorted(set(party.reading) - ended)
        if not open_ones:
            return
        lease = data.draw(st.sampled_from(open_ones))
        reading = party.reading[lease]
        fence: dict[int, int] = {}
        if how == "fenced":
            party.client.value += 1
            fence = dict.fromkeys(party.client.attaches, party.client.value)
        failed = (reading.pages[-1],) if how == "failed" else ()
        event = EndLease(party.client.name, party.client.epoch, lease, fence, failed_pages=failed)
        assert self.driver.apply(event) is None
        if how == "failed":
            gone = self.held[reading.pages[-1]]
            self.believed = {words for words in self.believed if words[: len(gone)] != gone}
        if fence:
            party.ends.append((party.client.value, lease, None))
        else:
            del party.reading[lease]

    @rule(who=st.integers(0, 1), rank=st.integers(0, RANKS - 1))
    def one_rank_runs(self, who: int, rank: int) -> None:
        client = self.parties[who].client
        self.driver.apply(TimelinesRead({client.attaches[rank]: client.value}))
        self._settle(self.parties[who])

    @rule(who=st.integers(0, 1))
    def all_ranks_run(self, who: int) -> None:
        self.parties[who].client.run()
        self._settle(self.parties[who])

    def _settle(self, party: Party) -> None:
        """What every rank has reached has happened."""
        words = self.driver.node.state.timelines
        reached = min(words[attach] for attach in party.client.attaches)
        for value, page, content in party.queued:
            if value <= reached:
                self.held[page] = content
        party.queued = [entry for entry in party.queued if entry[0] > reached]
        for value, lease, committed in party.ends:
            if value > reached:
                continue
            party.reading.pop(lease, None)
            party.writing.pop(lease, None)
            if isinstance(committed, Writing):
                # A twin stands in for equal spans, so what was found is as good as what was written.
                top = committed.known + committed.filled
                self.believed |= {committed.words[:n] for n in range(1, top + 1)}
        party.ends = [end for end in party.ends if end[0] > reached]

    @rule(who=st.integers(0, 1), rank=st.integers(0, RANKS - 1))
    def engine_dies(self, who: int, rank: int) -> None:
        """One rank may have done everything; the others write garbage until they are dead."""
        party = self.parties[who]
        self.one_rank_runs(who, rank)
        for attach in party.client.attaches:
            self.driver.apply(DetachRank(attach))
        self.driver.apply(EngineGone(party.client.name, party.client.epoch))
        self.parties[who] = self.join(party.client.name)

    @rule()
    def time_passes(self) -> None:
        """Leases of attached engines do not end with time."""
        self.driver.apply(Tick(), passes=2 * TTL)

    # -------------------------------------------------------------------------- invariants

    @invariant()
    def what_is_held_stays(self) -> None:
        pool = self.driver.pool("c/host")
        for party in self.parties:
            for reading in party.reading.values():
                for place, page in enumerate(reading.pages):
                    assert self.held[page] == reading.words[: place + 1], "a page changed while it was read"
            for writing in party.writing.values():
                states = pool.spaces["kv"].state[writing.pages]
                assert (states == PageState.FILLING).all(), "reserved pages are readable or free"

    def teardown(self) -> None:
        for party in self.parties:
            party.client.die()
        nothing_held(self.driver.node.state)
        assert isinstance(self.driver.node, Node)


TestLeases = LeaseMachine.TestCase
TestLeases.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
