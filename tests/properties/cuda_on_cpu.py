"""CUDA kernels compiled for the CPU with `cuda_on_cpu.h`, and called with numpy arrays."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

KERNELS = Path(__file__).resolve().parents[2] / "clients" / "glm" / "kernels"
HERE = Path(__file__).resolve().parent


def compiler() -> str | None:
    """The C++ compiler of this machine, if there is one."""
    return shutil.which("g++") or shutil.which("c++")


class CpuKernels:
    """The kernels of one source file. What only a GPU can do (guarded by `__CUDA_ARCH__`, inline loads) is left out."""

    def __init__(self, folder: Path, file: str, constants: Mapping[str, int]) -> None:
        source = (KERNELS / file).read_text(encoding="utf-8")
        source = source.replace("extern __shared__", "extern").replace("__shared__", "static")
        source = re.sub(r"#if __CUDA_ARCH__.*?#endif", "", source, flags=re.S)
        source = re.sub(
            r'asm volatile\("ld\..*?\);', "value = *static_cast<const uint4*>(address);", source, flags=re.S
        )
        macros = "".join(f"#define {name} {value}\n" for name, value in constants.items())
        code = f'{macros}#include "cuda_on_cpu.h"\n{source}\n{self._entries(source)}'
        path = folder / f"{Path(file).stem}.cpp"
        path.write_text(code, encoding="utf-8")
        library = path.with_suffix(".so")
        command = [str(compiler()), "-O1", "-std=c++17", "-shared", "-fPIC", "-w", f"-I{HERE}", "-o", str(library)]
        subprocess.run([*command, str(path)], check=True)
        self._library = ctypes.CDLL(str(library))

    @staticmethod
    def _entries(source: str) -> str:
        """A function `run_<kernel>(blocks, threads, seed, ...)` for each kernel, with its parameter list."""
        parameters = re.search(r"#define ROWS_PARAMETERS(.*?)\n#define", source, flags=re.S)
        shared = parameters[1].replace("\\", " ") if parameters else ""
        entries = []
        for name, listed in re.findall(
            r'extern "C" __global__ void (?:__launch_bounds__\(.*?\) )?(\w+)\((.*?)\) \{', source, flags=re.S
        ):
            listed = listed.replace("ROWS_PARAMETERS", shared)
            kinds = [re.sub(r"__restrict__|\w+\s*$", "", part) for part in listed.split(",")]
            takes = ", ".join(f"{kind} a{place}" for place, kind in enumerate(kinds))
            gives = ", ".join(f"a{place}" for place in range(len(kinds)))
            entries.append(
                f'extern "C" void run_{name}(int blocks, int threads, unsigned seed, {takes}) '
                f"{{ cpu::run(blocks, threads, seed, [&] {{ {name}({gives}); }}); }}"
            )
        return "\n".join(entries)

    def run(self, name: str, blocks: int, threads: int, seed: int, *arguments: Any) -> None:
        """Arrays are passed by address, numpy scalars by value."""
        kinds = {np.int32: ctypes.c_int, np.int64: ctypes.c_longlong}
        passed = [
            ctypes.c_void_p(part.ctypes.data) if isinstance(part, np.ndarray) else kinds[type(part)](part)
            for part in arguments
        ]
        getattr(self._library, f"run_{name}")(blocks, threads, ctypes.c_uint(seed), *passed)
