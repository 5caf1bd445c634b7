"""What counts as a pass, and the byte that the fault variant flips."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from rich.console import Console

from kvmanager.clients.glm.codec import Fp8Codec
from kvmanager.clients.glm.config import TINY
from kvmanager.clients.glm.model import Glm
from kvmanager.clients.glm.weights import Profile, make_weights
from kvmanager.clients.worker import ClassMemory
from kvmanager.demo.fault import EXPONENT_BIT, candidate_faults, inject_fault
from kvmanager.demo.report import LEAST_COUNT, MECHANISMS, DemoReport, TurnRecord, ledger_failures, make_report
from kvmanager.layout import Section, latent_layout
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.wire import NO_PAGE, pack_u32, pack_u64

ENOUGH = dict.fromkeys(MECHANISMS, LEAST_COUNT)
ANSWER = tuple(range(12))
ROWS = 16


def record(answer: tuple[int, ...] = ANSWER, expected: tuple[int, ...] = ANSWER) -> TurnRecord:
    return TurnRecord(1, "s", 100, 40, answer, expected, drafts_proposed=6, drafts_accepted=3)


def judge(
    records: list[TurnRecord], counters: dict[str, int] | None = None, ledger: list[str] | None = None
) -> DemoReport:
    return make_report(
        records,
        planned_turns=2,
        counters=ENOUGH if counters is None else counters,
        ledger_failures=ledger or [],
        other_failures=[],
        seconds=1.0,
    )


def test_a_good_replay_passes_and_adds_up() -> None:
    report = judge([record(), record()])
    assert report.passed
    assert (report.tokens_equal, report.ledger_ok) == (True, True)
    assert (report.prefilled_tokens, report.cached_tokens, report.decoded_tokens) == (120, 80, 24)
    assert report.acceptance == 0.5
    table = json.loads(json.dumps(report.to_json()))
    assert set(table["counters"]) == {*MECHANISMS, "prefix_hit", "handoff"}
    assert {"tokens_equal", "ledger_ok", "counters", "seconds", "failures"} <= set(table)
    console = Console(record=True, width=120, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(report.render())
    console.file.close()
    assert "passed" in console.export_text()


def test_one_wrong_token_is_named() -> None:
    wrong = (*ANSWER[:5], 99, *ANSWER[6:])
    report = judge([record(), record(wrong)])
    assert not report.tokens_equal
    assert report.failures == ("turn 1 of session s: token 5 is 99, the reference run has 5",)


def test_a_short_or_missing_answer_is_wrong() -> None:
    assert "11 tokens, the reference run has 12" in judge([record(), record(ANSWER[:-1])]).failures[0]
    report = judge([record()])
    assert not report.tokens_equal
    assert report.failures == ("1 of 2 turns have no answer",)
    assert not judge([]).tokens_equal


def test_answers_that_prove_little_are_refused() -> None:
    dull = tuple([1] * 12)
    report = judge([record(dull, dull), record()])
    assert not report.tokens_equal
    assert "6.5 distinct tokens" in report.failures[0]


@pytest.mark.parametrize("name", MECHANISMS)
def test_every_mechanism_must_have_happened(name: str) -> None:
    report = judge([record(), record()], ENOUGH | {name: LEAST_COUNT - 1})
    assert report.tokens_equal
    assert not report.passed
    assert report.failures == (f"{name} happened {LEAST_COUNT - 1} times, at least {LEAST_COUNT} were to be shown",)


def test_ledger_failures_fail_the_demo() -> None:
    report = judge([record(), record()], ledger=["3 B still pinned"])
    assert not report.ledger_ok
    assert not report.passed


def pool(**changes: int) -> pb.PoolStatus:
    sizes = {"capacity_bytes": 100, "free_bytes": 60, "ready_bytes": 40, "reclaimable_bytes": 40} | changes
    return pb.PoolStatus(pool="p/hbm", tier="device", **sizes)  # type: ignore[arg-type]


def test_a_quiet_node_holds_only_free_and_cached_bytes() -> None:
    assert ledger_failures("n", [pool()], [], []) == []


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"free_bytes": 59}, "sum to 99 B of 100 B"),
        ({"free_bytes": 50, "filling_bytes": 10}, "10 B still filling"),
        ({"free_bytes": 50, "draining_bytes": 10}, "10 B still draining"),
        ({"free_bytes": 50, "quarantined_bytes": 10}, "10 B still quarantined"),
        ({"free_bytes": 50, "reserved_bytes": 10}, "10 B still reserved"),
        ({"pinned_bytes": 10}, "10 B still pinned"),
        ({"promised_bytes": 10}, "10 B still promised"),
    ],
)
def test_what_a_quiet_node_still_holds_is_named(changes: dict[str, int], named: str) -> None:
    (failure,) = ledger_failures("n", [pool(**changes)], [], [])
    assert named in failure


def test_leases_and_requests_left_over_are_named() -> None:
    lease = pb.LeaseStatus(lease_id="l1", holder="h")
    request = pb.RequestStatus(request_id=4, engine="e", state="closing")
    failures = ledger_failures("n", [], [lease], [request])
    assert ["l1" in failures[0], "request 4 of e is still closing" in failures[1]] == [True, True]


# ------------------------------------------------------------------------------------------- fault


def opened(pages: int, *, on_host: bool) -> pb.OpenReply:
    """A request of `pages` pages, all in one tier; page i lies at index i."""
    here, nowhere = pack_u32(range(pages)), pack_u32([NO_PAGE] * pages)
    latent = pb.ClassPages(
        page_class="latent", device_pages=nowhere if on_host else here, host_pages=here if on_host else nowhere
    )
    run = pb.SpanRun(
        first_tokens=pack_u64([ROWS * i for i in range(pages)]),
        segments=pack_u32([1] * pages),
        interleave=pack_u32([1] * pages),
        uids=pack_u64(range(pages)),
        pages=[latent, pb.ClassPages(page_class="indexer", device_pages=here)],
    )
    return pb.OpenReply(request_id=1, spans=[run])


@pytest.fixture(scope="module")
def model() -> Glm:
    torch.set_num_threads(1)
    return Glm(TINY, make_weights(TINY, 1, Profile.CALM), torch.float64, Fp8Codec())


@pytest.fixture(scope="module")
def prompt() -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(5).integers(0, TINY.vocab, 4 * ROWS - 3))


def test_the_fault_flips_one_bit_of_a_row_that_the_next_step_reads(model: Glm, prompt: torch.Tensor) -> None:
    layout = latent_layout(TINY.format, ROWS)
    device, host = (np.zeros(4 * layout.page_bytes, np.uint8) for _ in range(2))
    place = inject_fault(model, prompt, 7, opened(4, on_host=True), ClassMemory(layout, device, host))
    assert place is not None
    assert not device.any()
    ((offset,),) = np.nonzero(host)
    assert host[offset] == EXPONENT_BIT
    component = layout.by_key[(Section.LATENT, 0)]
    page, rest = divmod(int(offset) - component.offset, component.page_stride)
    slot, byte = divmod(rest, component.slot_stride)
    faults = {(fault.position, fault.row_byte) for fault in candidate_faults(model, prompt, 7)}
    assert (page * ROWS + slot, byte) in faults


def test_rows_on_the_device_are_left_alone(model: Glm, prompt: torch.Tensor) -> None:
    layout = latent_layout(TINY.format, ROWS)
    device, host = (np.zeros(4 * layout.page_bytes, np.uint8) for _ in range(2))
    assert inject_fault(model, prompt, 7, opened(4, on_host=False), ClassMemory(layout, device, host)) is None
    assert not device.any()
    assert not host.any()


def test_only_faults_that_show_are_candidates(model: Glm, prompt: torch.Tensor) -> None:
    faults = list(candidate_faults(model, prompt, 7))
    assert faults
    assert all(0 <= fault.position < len(prompt) for fault in faults)
