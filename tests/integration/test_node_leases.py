"""A cache group on a real node: engines with memory of their own read and fill it by leases, and die while they do."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import grpc
import numpy as np
import pytest
from nodes_support import Node, kill_and_wait, node, says, script, wait_for

from kvmanager import __version__
from kvmanager.clients.attach import attach, grpc_channel
from kvmanager.clients.leases import LEASE_TTL_NS, CacheEngine
from kvmanager.errors import InvalidArgument, LayoutMismatch, UnknownLease, UnknownRequest, VersionMismatch
from kvmanager.layout import plain_format, plain_layout
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.transport.checksums import section_sum
from kvmanager.wire import WIRE_VERSION, error_from_rpc
from tests.sim.driver import chain_keys

ROWS, PAGES = 16, 12
FORMAT = plain_format("float32", 3, 2, 64)
LAYOUT = plain_layout(FORMAT, ROWS)
NAMESPACE = pb.Namespace(
    model="m", weights_revision="1", kv_format=FORMAT.name, key_hash="sha256_cbor", key_bytes=32, key_tokens=ROWS
)


def cache_toml(runtime_dir: Path, *, name: str = "cache", ranks: int = 1) -> str:
    return f"""
[node]
name = "{name}"
runtime_dir = "{runtime_dir}"
[[group]]
name = "kv"
kind = "cache"
format = "{FORMAT.name}"
ranks = {ranks}
page_rows = {ROWS}
host_bytes_per_rank = {PAGES * LAYOUT.page_bytes}
[mover]
staging_bytes = "1 MiB"
chunk_bytes = "1 MiB"
"""


def engine(runtime_dir: Path, name: str, model: str = "m", ranks: int = 1) -> CacheEngine:
    namespace = pb.Namespace()
    namespace.CopyFrom(NAMESPACE)
    namespace.model = model
    return CacheEngine(runtime_dir, name, group="kv", namespace=namespace, layout=LAYOUT, ranks=ranks)


def keys(what: object, segments: int) -> bytes:
    return chain_keys(what, segments, 32)


def content(what: object, place: int) -> np.ndarray:
    return np.random.default_rng([abs(hash(what)) % 1000, place]).integers(0, 256, LAYOUT.page_bytes, dtype=np.uint8)


def store(held: CacheEngine, lease: int, what: int, segments: int) -> int:
    """Stores a prompt's segments; how many were written."""
    reserved = held.reserve(lease, keys(what, segments))
    for place, page in enumerate(reserved.pages, start=reserved.tokens // ROWS):
        held.page(0, page)[:] = content(what, place)
    held.commit(lease)
    return len(reserved.pages)


def check(held: CacheEngine, lease: int, what: int, segments: int, expected: int) -> None:
    got = held.acquire(lease, keys(what, segments))
    assert got.tokens == expected * ROWS
    for place, page in enumerate(got.pages):
        assert np.array_equal(held.page(0, page), content(what, place))
    if got.tokens:
        held.done(lease)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Node]:
    with node(tmp_path, "cache", cache_toml) as running:
        yield running


def test_two_engines_share_the_cache_and_two_models_do_not(served: Node) -> None:
    first, second = engine(served.runtime_dir, "a"), engine(served.runtime_dir, "b")
    other = engine(served.runtime_dir, "c", model="another")
    assert store(first, 1, what=7, segments=5) == 5
    wait_for(lambda: second.lookup(keys(7, 6), 6 * ROWS) == 5 * ROWS)
    check(second, 1, what=7, segments=6, expected=5)
    assert store(second, 2, what=7, segments=6) == 1
    assert other.lookup(keys(7, 6), 6 * ROWS) == 0
    check(other, 1, what=7, segments=6, expected=0)
    with pytest.raises(UnknownLease):
        first.done(99)
    with pytest.raises(InvalidArgument, match="key bytes"):
        first.reserve(3, b"short")
    for held in (first, second, other):
        held.close()
    served.wait_at_rest()


def test_stores_in_a_row_and_ends_that_nobody_waits_for(served: Node) -> None:
    held = engine(served.runtime_dir, "a")
    reserved = held.reserve(1, keys(0, 2))
    for what in range(4):
        for place, page in enumerate(reserved.pages):
            held.page(0, page)[:] = content(what, place)
        reserved = held.commit_and_reserve(what + 1, what + 2, keys(what + 1, 2))
        assert held.lookup(keys(what, 2), 3 * ROWS) == 2 * ROWS, "the commit is answered, so all can find it"
    held.abort(5)
    for what in range(4):
        got = held.acquire(10 + what, keys(what, 2))
        for place, page in enumerate(got.pages):
            assert np.array_equal(held.page(0, page), content(what, place))
        held.release(10 + what)
    held.settle()
    assert list(served.admin.leases().leases) == []
    held.close()
    served.wait_at_rest()


def test_an_engine_of_another_layout_is_refused(served: Node) -> None:
    with pytest.raises(LayoutMismatch):
        CacheEngine(
            served.runtime_dir, "x", group="kv", namespace=NAMESPACE, layout=plain_layout(FORMAT, 2 * ROWS), ranks=1
        )


def test_what_is_reserved_is_readable_by_nobody_until_the_writer_says_so(served: Node) -> None:
    writer, reader = engine(served.runtime_dir, "w"), engine(served.runtime_dir, "r")
    reserved = writer.reserve(1, keys(1, 4))
    assert len(reserved.pages) == 4
    (shown,) = served.admin.leases().leases
    assert (shown.kind, shown.holder, shown.request_id, shown.tokens) == ("fill", "w", 1, 4 * ROWS)
    assert 0 < shown.expires_in_ns <= LEASE_TTL_NS
    assert reader.lookup(keys(1, 4), 4 * ROWS) == 0
    writer.abort(1)
    assert served.pools()["kv/host"][0] == PAGES * LAYOUT.page_bytes
    assert reader.lookup(keys(1, 4), 4 * ROWS) == 0
    writer.close()
    reader.close()


def test_daemon_killed_between_the_steps(served: Node) -> None:
    """Leases are in the journal: pages stay the writer's, and what is read stays pinned, over a crash of the daemon."""
    held, reader = engine(served.runtime_dir, "a"), engine(served.runtime_dir, "b")
    store(held, 1, what=3, segments=4)
    wait_for(lambda: reader.lookup(keys(3, 4), 4 * ROWS) == 4 * ROWS)
    reading = reader.acquire(1, keys(3, 4))
    assert [(shown.kind, shown.holder) for shown in served.admin.leases().leases] == [("read", "b")]
    reserved = held.reserve(2, keys(5, 4))
    for place, page in enumerate(reserved.pages):
        held.page(0, page)[:] = content(5, place)
    kill_and_wait(served.pid_of("daemon"))
    served.reopen()
    held.renew()
    reader.renew()
    again = held.reserve(2, keys(5, 4))  # the answer might have been lost
    assert again.pages == reserved.pages
    held.commit(2)
    assert reader.acquire(1, keys(3, 4)).pages == reading.pages
    reader.done(1)
    wait_for(lambda: reader.lookup(keys(5, 4), 4 * ROWS) == 4 * ROWS)
    check(reader, 3, what=5, segments=4, expected=4)
    check(reader, 4, what=3, segments=4, expected=4)
    held.close()
    reader.close()
    served.wait_at_rest()


WRITER = """
import sys, time
from pathlib import Path
from test_node_leases import engine, keys
held = engine(Path(sys.argv[1]), "writer")
reserved = held.reserve(1, keys(9, 6))
held.page(0, reserved.pages[0])[:] = 1
print("filling", flush=True)
time.sleep(600)
"""


def test_a_writer_that_dies_in_the_middle_leaves_nothing_readable(served: Node) -> None:
    reader = engine(served.runtime_dir, "reader")
    with script(WRITER, str(served.runtime_dir)) as writer:
        says(writer, "filling")
        assert served.pools()["kv/host"][2] == 6 * LAYOUT.page_bytes
        os.kill(writer.pid, signal.SIGKILL)
        wait_for(lambda: served.pools()["kv/host"][0] == PAGES * LAYOUT.page_bytes)
    assert reader.lookup(keys(9, 6), 6 * ROWS) == 0
    reader.close()


def test_more_than_the_pool_holds_is_stored_as_far_as_it_fits(served: Node) -> None:
    held = engine(served.runtime_dir, "a")
    assert store(held, 1, what=1, segments=PAGES + 5) == PAGES
    wait_for(lambda: held.lookup(keys(1, PAGES), PAGES * ROWS) == PAGES * ROWS)
    assert store(held, 2, what=2, segments=4) == 4
    wait_for(lambda: held.lookup(keys(2, 4), 4 * ROWS) == 4 * ROWS)
    check(held, 3, what=1, segments=PAGES, expected=PAGES - 4)
    held.close()


OLD_REGISTER = bytes.fromhex(
    "0a036f6c6412026b761a2a0a016d1201311a116b762f666c6f617433322f337832783634220b766c6c6d5f73686132353628203010224031"
    "6632343232346137393636353533353935636231623835666335353233663066316634306461323333333463333336376133663964633630"
    "623265313562662801"
)
"""A RegisterRequest as the program sent it before it told its version (engine "old", group "kv")."""


def test_a_client_of_another_version_is_refused_by_name(served: Node) -> None:
    with closing(attach(served.runtime_dir, "engine", "old")) as door, grpc_channel(door) as channel:
        register = channel.unary_unary(
            "/kvmanager.v1.Engine/Register", request_serializer=bytes, response_deserializer=pb.RegisterReply.FromString
        )
        newer = pb.RegisterRequest.FromString(OLD_REGISTER)
        newer.wire_version, newer.client_version = WIRE_VERSION + 1, "7.8.9"
        same = pb.RegisterRequest.FromString(OLD_REGISTER)
        same.wire_version = WIRE_VERSION
        for message, words in (
            (OLD_REGISTER, ("older", f"wire version {WIRE_VERSION}", __version__, "install")),
            (newer.SerializeToString(), ("newer", "7.8.9", __version__, "install")),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                register(message)
            error = error_from_rpc(caught.value)
            assert isinstance(error, VersionMismatch)
            for word in words:
                assert word in str(error)
        assert not served.admin.status().engines
        assert register(same.SerializeToString()).daemon_version == __version__, "nothing else was wrong with it"


def test_what_was_stored_is_read_with_its_sums_and_wrong_bytes_are_offered_once(served: Node) -> None:
    held = engine(served.runtime_dir, "a")
    reserved = held.reserve(1, keys(7, 4))
    for place, page in enumerate(reserved.pages):
        held.page(0, page)[:] = content(7, place)
    sums = {page: section_sum(held.page(0, page)).tobytes() for page in reserved.pages[:3]}
    for wrong in ({99: bytes(16)}, {reserved.pages[0]: bytes(8)}):
        with pytest.raises(InvalidArgument, match="sums"):
            held.commit(1, sums=wrong)
    held.commit(1, sums=sums)
    wait_for(lambda: held.lookup(keys(7, 4), 4 * ROWS) == 4 * ROWS)
    assert served.counters()["summed_page"] == 3
    # The daemon dies: what it knows of the bytes is in its journal.
    kill_and_wait(served.pid_of("daemon"))
    served.reopen()
    held.renew()
    got = held.acquire(2, keys(7, 4))
    assert got.sums == sums
    bad = got.pages[1]
    held.page(0, bad)[5] ^= 1
    assert [page for page in got.sums if section_sum(held.page(0, page)).tobytes() != got.sums[page]] == [bad]
    held.done(2, failed_pages=[bad], failure="1 page is not what was written")
    wait_for(lambda: held.lookup(keys(7, 4), 4 * ROWS) == ROWS)
    # Its place is used anew: the sums of what lay there before are nobody's.
    assert store(held, 3, what=7, segments=4) == 3
    wait_for(lambda: held.lookup(keys(7, 4), 4 * ROWS) == 4 * ROWS)
    assert list(held.acquire(4, keys(7, 4)).sums) == got.pages[:1]
    held.done(4)
    held.close()
    served.wait_at_rest()


def test_the_story_of_a_request_by_the_name_that_its_engine_has_for_it(served: Node) -> None:
    held = engine(served.runtime_dir, "a")
    name = 'cmpl-"7"'
    held.reserve(1, keys(7, 4), "chat", name=name)
    story = [line.text for line in served.admin.explain("request", name).lines]
    assert "a/1 of epoch" in story[0]
    assert "to store of session chat" in story[0]
    assert "64 tokens in kv, 0 found, 64 missed (never seen)" in story[0]
    assert any("running" in text for text in story[1:]), story
    kill_and_wait(served.pid_of("daemon"))
    served.reopen()
    held.renew()
    held.commit(1)
    wait_for(lambda: held.lookup(keys(7, 4), 4 * ROWS) == 4 * ROWS)
    got = held.acquire(2, keys(7, 5), name=name)
    assert got.tokens == 4 * ROWS
    held.done(2, failed_pages=got.pages[3:], failure="broken on purpose")
    other = engine(served.runtime_dir, "b")
    assert other.acquire(1, keys(7, 4), name="other").tokens == 3 * ROWS
    other.done(1)
    story = [line.text for line in served.admin.explain("request", name).lines]
    assert [text.partition(" of epoch")[0] for text in story] == ["lease a/1", "lease a/1", "lease a/2", "lease a/2"]
    assert "stored up to token 64" in story[1]
    assert "64 found, 16 missed" in story[2]
    assert "a copy failed: broken on purpose; pages that could not be read" in story[3]
    missed = [line.text for line in served.admin.explain("miss", "other").lines]
    assert any("its copy could not be loaded" in text for text in missed), missed
    # As vLLM names them: the user knows the id without what vLLM puts around it.
    for name in ("0_cmpl-9-0a1b2c3d", "1_cmpl-9-deadbeef", "cmpl-91-0a1b2c3d", "cmpl-9-not8"):
        assert other.acquire(2, keys(7, 1), name=name).tokens == ROWS
        other.done(2)
    assert len(served.admin.explain("request", "cmpl-9").lines) == 4
    assert len(served.admin.explain("request", "cmpl-9-not8").lines) == 2
    with pytest.raises(UnknownRequest):
        served.admin.explain("request", "never heard of")
    with pytest.raises(InvalidArgument, match="256"):
        held.acquire(9, keys(7, 1), name="x" * 257)
    held.close()
    other.close()
