"""What GPU memory promises and a machine without a GPU can show."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from kvmanager.allocators.backing import open_memfd
from kvmanager.allocators.cuda_driver import EXIT_FORKED, device_ordinal
from kvmanager.allocators.device_memory import same_memory
from kvmanager.configuration.groups import plan_memory
from kvmanager.configuration.reading import parse_config
from kvmanager.daemon.memory import NodeRegions
from kvmanager.errors import InvalidArgument


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:", "cuda:-1", "cuda:01", "cuda:1 ", "gpu:0", ""])
def test_what_is_no_gpu(device: str) -> None:
    with pytest.raises(InvalidArgument, match="cuda:0"):
        device_ordinal(device)


def test_ordinals() -> None:
    assert [device_ordinal(f"cuda:{n}") for n in (0, 7, 12)] == [0, 7, 12]


def test_same_memory_is_about_descriptions_not_inodes() -> None:
    first, second = os.memfd_create("a"), os.memfd_create("a")
    again = os.open(f"/proc/self/fd/{first}", os.O_RDWR)
    copy = os.dup(first)
    try:
        assert same_memory(first, copy)
        assert same_memory(first, first)
        assert not same_memory(first, second)
        assert os.fstat(again).st_ino == os.fstat(first).st_ino
        assert not same_memory(first, again), "another description of one file"
    finally:
        for fd in (first, second, again, copy):
            os.close(fd)


def test_regions_found_again_must_be_of_their_kind() -> None:
    """As when the device in the configuration changed while the daemon was down."""
    config = parse_config(
        '[node]\nname = "n"\nruntime_dir = "/tmp/n"\ndevice = "cuda:0"\n'
        '[[group]]\nname = "g"\nkind = "sharded"\nformat = "glm-5.3-tiny-fp8_ds_mla"\nranks = 1\npage_rows = 16\n'
        'hbm_bytes_per_rank = "1 MiB"\nhost_bytes_per_rank = "1 MiB"\n'
    )
    plan = plan_memory(config)
    assert [region.rdma_capable for region in plan.regions] == [region.on_gpu for region in plan.regions]
    assert sum(region.on_gpu for region in plan.regions) == 1
    found = {region.region_id: open_memfd("old", region.size_bytes) for region in plan.regions}  # it closes them
    with pytest.raises(InvalidArgument, match="region says GPU memory"):
        NodeRegions(plan, None, found)


def test_a_child_forked_after_cuda_was_loaded_ends_at_once_and_programs_still_start() -> None:
    result = run(
        "import os, subprocess, sys\n"
        "from kvmanager.allocators.cuda_driver import forbid_fork\n"
        "forbid_fork()\n"
        "assert subprocess.run([sys.executable, '-c', 'print(7)'], capture_output=True, text=True).stdout == '7\\n'\n"
        "pid = os.fork()\n"
        "if pid == 0: print('the child lives', flush=True)\n"
        "print('child exit', os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    assert result.stdout == f"child exit {EXIT_FORKED}\n"
    assert "fork() in a process that uses GPU memory" in result.stderr


def test_without_cuda_everything_loads_and_asking_for_a_gpu_says_what_is_missing() -> None:
    result = run(
        "import sys\n"
        "sys.modules['cuda'] = None\n"
        "import kvmanager.daemon.daemon, kvmanager.mover, kvmanager.clients.worker\n"
        "from kvmanager.allocators.device_memory import create_device_memory\n"
        "from kvmanager.errors import DeviceError\n"
        "try: create_device_memory('x', 'cuda:0', 1)\n"
        "except DeviceError as error: print(error)\n"
    )
    assert "no CUDA bindings for Python" in result.stdout, result
    assert "kvmanager[gpu]" in result.stdout


@pytest.mark.skipif(importlib.util.find_spec("cuda") is not None, reason="this environment has the CUDA bindings")
def test_a_mover_and_a_daemon_for_a_missing_gpu_end_with_the_configuration_code(tmp_path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "kvmanager.mover", "--runtime-dir", str(tmp_path / "m"), "--device", "cuda:0"],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert result.returncode == 78
    assert "no mover for device 'cuda:0'" in result.stderr
    config = tmp_path / "node.toml"
    config.write_text(
        f'[node]\nname = "n"\nruntime_dir = "{tmp_path / "d"}"\ndevice = "cuda:0"\n'
        '[[group]]\nname = "g"\nkind = "sharded"\nformat = "glm-5.3-tiny-fp8_ds_mla"\nranks = 1\npage_rows = 16\n'
        'hbm_bytes_per_rank = "1 MiB"\nhost_bytes_per_rank = "1 MiB"\n'
    )
    result = subprocess.run(
        [sys.executable, "-m", "kvmanager.daemon", "--config", str(config)],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert result.returncode == 78
    assert "CUDA" in result.stderr
