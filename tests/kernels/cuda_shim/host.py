"""Builds the CUDA sources for the CPU (see shim.h) and stands in for `cuda_driver`."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from batchjob_kernels.cuda_build import Variant
from batchjob_kernels.cuda_compilers import SOURCES

HERE = Path(__file__).parent
GXX = shutil.which("g++")


def _compile(*arguments: str | Path) -> None:
    command = [str(GXX), "-O1", "-std=c++17", "-Wall", "-Wno-unknown-pragmas", "-fPIC", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


class ShimError(AssertionError):
    """What the machine of shim.h objects to."""


class Shim:
    """`launch` and `num_multiprocessors` of `cuda_driver`, on CPU tensors."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.library.shim_launch.restype = ctypes.c_char_p
        self.readable: Tensor | None = None  # the cache: asynchronous copies may read nothing else
        self.launches: list[tuple[str, tuple[int, int, int]]] = []

    def num_multiprocessors(self, device: torch.device) -> int:
        return 1

    def launch(
        self,
        variant: Variant,
        entry: str,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        params: ctypes.Structure,
        device: torch.device,
    ) -> None:
        self.launches.append((entry, grid))
        assert self.readable is not None
        assert params.cache == self.readable.data_ptr()
        said = self.library.shim_launch(
            f"{variant.name}:{entry}".encode(),
            (ctypes.c_int * 3)(*grid),
            threads,
            shared_bytes,
            ctypes.byref(params),
            ctypes.c_void_p(self.readable.data_ptr()),
            ctypes.c_long(self.readable.nbytes),
            ctypes.c_uint(len(self.launches)),
        )
        if said:
            raise ShimError(said.decode())


def build(directory: Path, variants: Iterable[Variant], patches: Iterable[tuple[str, str]] = ()) -> Shim:
    """The library with these variants, made in `directory` from the sources with each text of `patches`, which must be
    there once, replaced by another."""
    directory.mkdir(parents=True, exist_ok=True)
    texts = {path.name: path.read_text() for path in SOURCES.iterdir() if path.suffix in (".cu", ".cuh")}
    for old, new in patches:
        assert sum(text.count(old) for text in texts.values()) == 1, f"not there once: {old}"
        texts = {name: text.replace(old, new) for name, text in texts.items()}
    for name, text in texts.items():
        (directory / name).write_text(text)
    lines = []
    for variant in variants:
        kind = "WRITE" if variant.source == "write_kv.cu" else "DECODE"
        lines.append(f'{kind}("{variant.name}", {", ".join(value for _, value in variant.defines)})\n')
    (directory / "variants.inc").write_text("".join(lines))
    machine = directory.parent / "shim.o"  # the same for every library of a test run
    if not machine.exists():
        _compile("-c", HERE / "shim.cpp", "-o", machine)
    library = directory / "kernels.so"
    _compile("-shared", f"-I{directory}", f"-I{HERE}", HERE / "kernels.cpp", machine, "-o", library)
    return Shim(library)
