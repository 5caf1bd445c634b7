"""GPU memory in this process: mapped without a copy, refused when it is not what was said, and the timeline word."""

from __future__ import annotations

import mmap
import os
import time

import numpy as np
import pytest
import torch
from gpu_regions import host_array

from kvmanager.allocators.cuda_driver import DeviceContext, call, device_handle
from kvmanager.allocators.device_memory import DeviceMapping, create_device_memory, same_memory
from kvmanager.errors import ConfigError, DeviceError, InvalidArgument
from kvmanager.transport.gpu_rank import GpuRank
from kvmanager.transport.gpu_timeline import GpuTimeline
from kvmanager.units import GIB, MIB
from kvmanager.wire import RegionInfo, RegionKind

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def context() -> DeviceContext:
    return DeviceContext("cuda:0")


@pytest.mark.parametrize("size", [1, 3 * MIB + 1, 64 * MIB])
def test_two_mappings_show_the_same_bytes_and_torch_copies_nothing(size: int) -> None:
    fd = create_device_memory("test", "cuda:0", size)
    assert not os.get_inheritable(fd)
    info = RegionInfo(3, RegionKind.DEVICE, size, device="cuda:0")
    rank = GpuRank([(info, fd)], [], host_array(mmap.PAGESIZE))
    other = DeviceMapping(fd, "cuda:0", size)
    os.close(fd)
    tensor = rank.tensors[3]
    assert (tensor.dtype, tuple(tensor.shape), str(tensor.device)) == (torch.uint8, (size,), "cuda:0")
    values = torch.randint(0, 256, (size,), dtype=torch.uint8)
    tensor.copy_(values)
    torch.cuda.synchronize()
    found = np.empty(size, np.uint8)
    call("cuMemcpyDtoH", found.ctypes.data, other.address, size)
    assert np.array_equal(found, values.numpy())
    assert other.address != tensor.data_ptr()
    other.close()
    rank.close()


def test_the_mapping_lasts_as_long_as_a_view_of_it() -> None:
    free, _ = torch.cuda.mem_get_info(0)
    fd = create_device_memory("test", "cuda:0", GIB)
    rank = GpuRank([(RegionInfo(3, RegionKind.DEVICE, GIB, device="cuda:0"), fd)], [], host_array(mmap.PAGESIZE))
    os.close(fd)
    view = rank.tensors[3][5:10]
    rank.close()
    del rank
    view.fill_(9)
    assert view.cpu().tolist() == [9] * 5
    assert torch.cuda.mem_get_info(0)[0] <= free - GIB
    del view
    assert torch.cuda.mem_get_info(0)[0] > free - GIB // 2


def test_wrong_descriptors_are_typed_errors() -> None:
    memfd = os.memfd_create("no-gpu")
    with pytest.raises(InvalidArgument, match="no GPU memory"):
        DeviceMapping(memfd, "cuda:0", MIB)
    os.close(memfd)
    fd = create_device_memory("test", "cuda:0", 4 * MIB)
    with pytest.raises(InvalidArgument, match="does not hold"):
        DeviceMapping(fd, "cuda:0", 40 * MIB)
    os.close(fd)
    with pytest.raises(ConfigError, match="no room for it"):
        create_device_memory("huge", "cuda:0", 1 << 42)
    with pytest.raises(DeviceError, match="no GPU 99"):
        create_device_memory("test", "cuda:99", MIB)


def test_two_allocations_are_told_apart_although_their_inodes_may_agree() -> None:
    first, second = (create_device_memory("test", "cuda:0", 2 * MIB) for _ in range(2))
    copy = os.dup(first)
    assert same_memory(first, copy)
    assert not same_memory(first, second)
    for fd in (first, second, copy):
        os.close(fd)


def test_the_gpu_can_give_rdma_capable_memory() -> None:
    from cuda.bindings.driver import CUdevice_attribute

    attribute = CUdevice_attribute.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
    assert call("cuDeviceGetAttribute", attribute, device_handle(0)) == 1


def test_the_word_is_seen_only_after_the_work_before_it() -> None:
    page = host_array(mmap.PAGESIZE)
    words = page.view(np.uint64)
    line = GpuTimeline(page)
    pinned = torch.zeros(1 << 20, dtype=torch.uint8).pin_memory()
    source = torch.full((1 << 20,), 77, dtype=torch.uint8, device="cuda:0")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(400_000_000)
        pinned.copy_(source, non_blocking=True)
        line.raise_in_stream(5, 41, stream.cuda_stream)
    assert words[5] == 0
    assert pinned[0] == 0
    give_up = time.monotonic() + 20
    while words[5] != 41:
        assert time.monotonic() < give_up
    assert bool((pinned == 77).all())
    with pytest.raises(InvalidArgument, match="word 512"):
        line.raise_in_stream(512, 1, stream.cuda_stream)
    line.close()
