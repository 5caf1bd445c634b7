"""BL-21: a long prompt takes descriptors by the thousand, not by the row, and a buffer in use is not filled again."""

import sys

import numpy as np

from kvmanager.configuration.groups import STAGING_REGION
from kvmanager.core.events import PullTarget
from kvmanager.core.spanplans import SpanRun
from kvmanager.daemon.pulls import SourceSpans, Staging, TargetClass, build_pull
from kvmanager.geometry import SEQUENTIAL, TokenOrder
from kvmanager.layout import GLM53, GLM53_TINY, indexer_layout, latent_layout, native_layout
from kvmanager.planwire import ring_from_proto, ring_to_proto
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.transport.executor import Outcome
from kvmanager.transport.ring import RingPull
from kvmanager.transport.runs import join_neighbours
from kvmanager.units import MIB
from tests.pulled import Pulled, SourceMemory

RANKS, ROWS = 8, 64
SOURCE = native_layout(GLM53, ROWS)
SLICE_TOKENS = 16_384


class _Always:
    """Dice that show one number."""

    def __init__(self, shown: float) -> None:
        self.random = lambda: shown


def built(tokens: int, scattered: bool = True) -> RingPull:
    """The pull of a prompt whose pages lie anywhere, in slices of what a buffer of 16,384 tokens holds."""
    rng = np.random.default_rng(1)
    spans = -(-tokens // (RANKS * ROWS))
    pages = rng.permutation(2 * spans)[:spans] if scattered else np.arange(spans)
    source = SourceSpans(
        RANKS, np.arange(spans) * RANKS * ROWS, np.full(spans, RANKS), np.ones(spans, np.int64), pages.astype(np.int64)
    )
    count = -(-tokens // ROWS)
    targets = [
        TargetClass(make(GLM53, ROWS), PullTarget(name, (SpanRun(0, SEQUENTIAL, (region,), where),), tokens))
        for name, make, region, where in (
            ("latent", latent_layout, 10, rng.permutation(count)),
            ("indexer", indexer_layout, 11, rng.permutation(count)),
        )
    ]  # fmt: skip
    bases = [(rank + 1) << 40 for rank in range(RANKS)]
    return build_pull(1, SOURCE, source, bases, targets, Staging(2, SLICE_TOKENS // ROWS), 0)


def test_descriptors_are_in_the_low_thousands_and_the_message_is_small() -> None:
    ring = built(250_000)
    assert ring.chunks == -(-250_000 // SLICE_TOKENS) == 16
    descriptors = 0
    for chunk in range(ring.chunks):
        addresses, offsets, lengths = (array.astype(np.int64) for array in ring.reads(chunk))
        descriptors += len(join_neighbours(addresses, offsets, lengths)[0])
    pages = -(-250_000 // (RANKS * ROWS)) * RANKS
    assert descriptors <= pages < 4_000, "a page of all layers is one descriptor, not one a layer and token"
    message = ring_to_proto(ring).SerializeToString()
    assert len(message) < MIB
    assert np.array_equal(ring_from_proto(pb.Pull.FromString(message)).addresses, ring.addresses)
    assert sum(int(length) for chunk in range(ring.chunks) for length in ring.reads(chunk)[2]) == len(
        ring.addresses
    ) * SOURCE.page_bytes


def test_no_step_of_the_plan_is_taken_token_by_token() -> None:
    """Calls made for a plan and for its message: ten times the tokens must not take ten times as many."""
    counts = []
    for tokens in (25_000, 250_000):
        calls = 0

        def count(_frame: object, event: str, _argument: object) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            ring_to_proto(built(tokens)).SerializeToString()
        finally:
            sys.setprofile(None)
        counts.append(calls)
    assert counts[1] < 2 * counts[0], counts
    assert counts[1] < 250_000 // 10, counts


def test_a_slice_waits_for_the_one_before_it_in_the_same_buffer() -> None:
    layout = native_layout(GLM53_TINY, 16)
    source = SourceMemory(layout, 2, TokenOrder(2, 1), 4 * 32, np.random.default_rng(2))
    latent = latent_layout(GLM53_TINY, 16)
    pulled = Pulled([source], {10: 8 * latent.components[0].page_stride}, 4 * layout.page_bytes, 5, ahead=2)
    wanted = TargetClass(latent, PullTarget("latent", (SpanRun(0, SEQUENTIAL, (10,), np.arange(8)),), 4 * 32))
    reader, staging = pulled.reader, pulled.regions[STAGING_REGION]
    held, ended = [], []
    begin = reader.read

    def read(*arguments: object) -> int:
        held.append(arguments[3])
        return begin(*arguments)

    reader.read = read
    reader.draw = _Always(0.4)  # nothing ends
    pulled.submit(1, 0, [wanted], 4)
    for _ in range(20):
        ended += pulled.pipeline.poll()
    assert (len(held), ended) == (1, []), "the ring has one place, and the first slice is still being read into it"
    before = staging.copy()
    reader.draw = _Always(0.9)  # all ends
    while pulled.pipeline.outstanding():
        ended += pulled.pipeline.poll()
    assert [c.outcome for c in ended] == [Outcome.DONE]
    assert len(held) == 2
    assert not np.array_equal(before, staging)
    assert ended[0].moved_bytes == 8 * layout.page_bytes
