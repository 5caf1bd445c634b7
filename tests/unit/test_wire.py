"""The codecs: what goes out comes back, and what makes no sense is refused by name."""

import inspect
import subprocess
import sys
from concurrent import futures
from dataclasses import replace

import grpc
import numpy as np
import pytest

from kvmanager import errors, wire
from kvmanager.core.plans import Box, CopyPlan, PagedCopies, PlacedPages, Purpose
from kvmanager.layout import GLM53, GLM53_TINY, latent_layout, native_layout
from kvmanager.planwire import PLAN_MAX_BOXES, PLAN_MAX_ENTRIES, plan_from_proto, plan_to_proto
from kvmanager.protos import kvmanager_pb2 as pb


def _plan() -> CopyPlan:
    big = np.array([0, 3_502_592 * 613, 3_502_592 * 1226 + 7], dtype=np.int64)
    pages, none = np.array([0, 613, 1226, 2**32 - 1], dtype=np.int64), np.zeros(0, np.int64)
    boxes = (
        Box(0, 2**40, 656, -656, 3_502_592, 2**41, (4, 16), (1000, -656), (2000, 656), 656),
        Box(7, 0, 0, 0, 0, 0, (), (), (), 3_502_592),
    )
    columns = np.arange(3)
    one = columns[:1], big[:1]
    copies = (
        PagedCopies(1, 2, 2, PlacedPages(pages, 1, columns, big), PlacedPages(pages, 0, columns[::-1], -big), boxes),
        PagedCopies(1, 3, 4, PlacedPages(pages, 1, *one), PlacedPages(pages[:2], 0, *one), ()),
        PagedCopies(7, 2, 9, PlacedPages(none, 1, none, none), PlacedPages(none, 5, none, none), boxes[:1]),
    )
    return CopyPlan(2**64 - 1, Purpose.ONBOARD, copies)


def _same(a: CopyPlan, b: CopyPlan) -> bool:
    def flat(plan):
        return [
            (c.source_region, c.target_region, c.groups, c.boxes, s.pages.tolist(), s.advance, s.columns.tolist(),
             s.slots.tolist(), s.pages.dtype)
            for c in plan.copies
            for s in (c.source, c.target)
        ]  # fmt: skip

    return (a.plan_id, a.purpose, flat(a)) == (b.plan_id, b.purpose, flat(b))


@pytest.mark.parametrize(
    ("pack", "unpack", "values"),
    [
        (wire.pack_u32, wire.unpack_u32, [0, 1, wire.NO_PAGE]),
        (wire.pack_u64, wire.unpack_u64, [0, 2**64 - 1, 2**33]),
        (wire.pack_i64, wire.unpack_i64, [-(2**63), 0, 2**63 - 1]),
    ],
)
def test_arrays_come_back(pack, unpack, values):
    assert unpack(pack(values), "f").tolist() == values
    assert unpack(pack(tuple(values[:1])), "f").tolist() == values[:1]
    assert pack([]) == b""
    assert len(unpack(b"", "f")) == 0


def test_arrays_are_little_endian():
    assert wire.pack_u32([0x01020304]) == bytes([4, 3, 2, 1])
    assert wire.pack_u64(np.array([1], dtype=">u8")) == bytes([1, 0, 0, 0, 0, 0, 0, 0])


@pytest.mark.parametrize(
    ("pack", "values"),
    [
        (wire.pack_u32, [2**32]),
        (wire.pack_u32, [-1]),
        (wire.pack_u64, [-1]),
        (wire.pack_i64, np.array([2**63], dtype=np.uint64)),
        (wire.pack_u32, [1.0]),
        (wire.pack_u32, [[1, 2]]),
    ],
)
def test_values_that_do_not_fit_are_refused_not_wrapped(pack, values):
    with pytest.raises(errors.InvalidArgument):
        pack(values)


def test_a_torn_array_names_its_field():
    for unpack, width in ((wire.unpack_u32, 4), (wire.unpack_u64, 8), (wire.unpack_i64, 8)):
        with pytest.raises(errors.InvalidArgument, match=r"ClassPages\.device_pages"):
            unpack(bytes(width + 1), "ClassPages.device_pages")


def test_plans_come_back_through_bytes():
    message = plan_to_proto(_plan())
    assert len(message.page_tables) == 3, "a table that patterns share goes once"
    back = plan_from_proto(pb.Plan.FromString(message.SerializeToString()))
    assert _same(back, _plan())
    assert back.total_bytes == _plan().total_bytes
    assert back.copies[0].source.pages is back.copies[1].source.pages


def _change(path, value):
    def change(plan):
        *way, field = path.split(".")
        part = plan.copies[0]
        for name in way:
            part = part.boxes[0] if name == "box" else getattr(part, name)
        setattr(part, field, value)

    return change


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        ("source.slots", bytes(8), "source: 1 slots for 3 columns"),
        ("source.slots", bytes(9), r"PagedCopies\.source\.slots"),
        ("target.columns", bytes(7), r"PagedCopies\.target\.columns"),
        ("target.table", 3, "page table 3 of 3"),
        ("groups", 3, "group 2 needs entry 4 of 4 pages"),
        ("groups", 2**63, "needs entry"),
        ("source.advance", 2**64 - 1, "needs entry"),
        ("source.columns", wire.pack_u32([0, 1, 2**32 - 1]), "needs entry"),
        ("box.counts", wire.pack_u64([4]), "1 counts"),
        ("box.counts", wire.pack_u64([4, 0]), "at least 1"),
        ("box.source_strides", b"", "0 source strides"),
        ("box.row_bytes", 0, "0 B"),
    ],
)
def test_plans_that_make_no_sense_are_refused(path, value, text):
    message = plan_to_proto(_plan())
    _change(path, value)(message)
    with pytest.raises(errors.InvalidArgument, match=text):
        plan_from_proto(message)


def test_one_sided_placements_are_refused():
    message = plan_to_proto(_plan())
    message.copies[0].source.columns, message.copies[0].source.slots = bytes(4), bytes(8)
    with pytest.raises(errors.InvalidArgument, match="1 source placements for 3 target placements"):
        plan_from_proto(message)


def test_a_plan_beyond_its_limits_is_refused_on_both_sides():
    page, places = np.zeros(1, np.int64), np.zeros(PLAN_MAX_ENTRIES // 2, np.int64)
    side = PlacedPages(page, 0, places, places)
    box = Box(0, 0, 0, 0, 1, 1, (), (), (), 1)
    with pytest.raises(errors.LimitExceeded, match="4,194,305 page entries; a plan has at most 4,194,304"):
        plan_to_proto(CopyPlan(1, Purpose.PLACE, (PagedCopies(1, 2, 1, side, side, (box,)),)))
    few = PlacedPages(page, 0, page, page)
    boxes = (box,) * (PLAN_MAX_BOXES + 1)
    with pytest.raises(errors.LimitExceeded, match="65,537 boxes"):
        plan_to_proto(CopyPlan(1, Purpose.PLACE, (PagedCopies(1, 2, 1, few, few, boxes),)))
    message = plan_to_proto(CopyPlan(1, Purpose.PLACE, (PagedCopies(1, 2, 1, few, few, boxes[:1]),)))
    message.page_tables.append(bytes(4 * PLAN_MAX_ENTRIES))
    with pytest.raises(errors.LimitExceeded, match="page entries"):
        plan_from_proto(message)


def test_an_unknown_purpose_is_refused():
    with pytest.raises(errors.InvalidArgument, match="'teleport'"):
        plan_from_proto(pb.Plan(plan_id=1, purpose="teleport"))


def test_layouts_come_back_and_their_fingerprint_is_checked():
    for layout in (native_layout(GLM53, 64), latent_layout(GLM53_TINY, 16)):
        message = wire.layout_to_proto(layout)
        assert wire.layout_from_proto(message) == layout
        message.components[3].offset += 1
        with pytest.raises(errors.LayoutMismatch, match=layout.fingerprint):
            wire.layout_from_proto(message)


def test_a_layout_with_an_unknown_section_is_refused():
    message = wire.layout_to_proto(native_layout(GLM53_TINY, 16))
    message.components[0].section = "values"
    with pytest.raises(errors.InvalidArgument, match="'values'"):
        wire.layout_from_proto(message)


def test_regions_come_back():
    region = wire.RegionInfo(7, wire.RegionKind.STAGING, 2**33, 3_502_592, 5, "shard", "cuda:3", (0, 2**32))
    assert wire.region_from_proto(wire.region_to_proto(region)) == region
    for kind in wire.RegionKind:
        assert pb.RegionKind.Value(kind.name) == kind.value
        assert wire.region_from_proto(wire.region_to_proto(replace(region, kind=kind))).kind is kind


def test_regions_that_make_no_sense_are_refused():
    with pytest.raises(errors.InvalidArgument, match="kind 0"):
        wire.region_from_proto(pb.Region(region_id=1, size_bytes=5))
    with pytest.raises(errors.InvalidArgument, match="no bytes"):
        wire.region_from_proto(pb.Region(region_id=1, kind=pb.HOST))


# Classes that share a reason with a more telling one, and what they arrive as.
_ARRIVES_AS = {
    errors.RequestError: errors.InvalidArgument,
    errors.ConfigError: errors.InvalidArgument,
    errors.CapacityError: errors.PoolExhausted,
    errors.TransferError: errors.TransferFailed,
    errors.DaemonError: errors.NotReady,
    errors.DeviceError: errors.NotReady,
}
_ALL = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, errors.KVError)]


@pytest.mark.parametrize("cls", _ALL)
def test_every_error_comes_back_in_its_class(cls):
    if issubclass(cls, errors.CapacityError):
        error = cls("no room", pool="shard", needed=9, free=2, holder="engine-1", retry_after_ns=5)
    else:
        error = cls("pages 3..7 of pool 'x'")
    back = wire.error_from_proto(pb.Error.FromString(wire.error_to_proto(error).SerializeToString()))
    assert type(back) is _ARRIVES_AS.get(cls, cls)
    assert str(back) == str(error)
    assert vars(back) == vars(error)


def test_every_reason_has_a_status_and_a_class():
    for name in pb.ErrorReason.keys():  # noqa: SIM118 (an enum wrapper, not a dict)
        assert hasattr(grpc.StatusCode, wire._STATUS[name])
        assert isinstance(wire.error_from_proto(pb.Error(reason=pb.ErrorReason.Value(name))), errors.KVError)


def test_a_reason_of_a_later_version_is_not_taken_for_another():
    message = pb.Error.FromString(bytes([8, 99]) + pb.Error(message="new").SerializeToString())
    assert type(wire.error_from_proto(message)) is errors.DaemonError


class _Servicer(grpc.GenericRpcHandler):
    def __init__(self, error):
        self.error = error

    def service(self, details):
        def call(_request, context):
            if details.method == "/t/typed":
                wire.abort_with(context, self.error)
            context.abort(grpc.StatusCode.PERMISSION_DENIED, "bare")

        return grpc.unary_unary_rpc_method_handler(call)


def test_errors_cross_a_real_grpc_call(tmp_path):
    error = errors.QuotaExceeded("tenant 'a' \N{EM DASH} " + "x" * 9000, pool="shard", needed=4, free=1, holder="b")
    server = grpc.server(futures.ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((_Servicer(error),))
    server.add_insecure_port(f"unix:{tmp_path}/s.sock")
    server.start()
    try:
        with grpc.insecure_channel(f"unix:{tmp_path}/s.sock") as channel:
            with pytest.raises(grpc.RpcError) as raised:
                channel.unary_unary("/t/typed")(b"", timeout=10)
            assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            back = wire.error_from_rpc(raised.value)
            assert type(back) is errors.QuotaExceeded
            assert vars(back) == vars(error)
            assert str(error).startswith(str(back)[:2000])
            with pytest.raises(grpc.RpcError) as raised:
                channel.unary_unary("/t/bare")(b"", timeout=10)
            assert type(wire.error_from_rpc(raised.value)) is errors.Unauthorized
        with grpc.insecure_channel(f"unix:{tmp_path}/none.sock") as channel:
            with pytest.raises(grpc.RpcError) as raised:
                channel.unary_unary("/t/typed")(b"", timeout=10)
            assert type(wire.error_from_rpc(raised.value)) is errors.DaemonError
    finally:
        server.stop(None).wait()


def test_the_module_itself_loads_no_grpc_and_no_torch():
    code = "import sys, kvmanager.wire; print(sorted({'grpc', 'torch', 'nixl_cu13'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
