"""Loads compiled kernels and launches them on PyTorch's current stream, through NVIDIA's driver library (libcuda)."""

from __future__ import annotations

import ctypes
import threading
from functools import cache

import torch

from batchjob_kernels.cuda_build import Variant, cubin

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_thread = threading.local()


class DriverError(RuntimeError):
    """The driver refused a call."""


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def missing() -> str | None:
    """Why the driver library cannot be used; None: it can."""
    try:
        _driver()
    except OSError as error:
        return f"NVIDIA's driver library cannot be loaded: {error}"
    return None


def _check(code: int, doing: str) -> None:
    if code != 0:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise DriverError(f"{doing}: {(text.value or b'unknown error').decode()} (CUDA error {code})")


@cache
def num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _module(variant: Variant, index: int) -> ctypes.c_void_p:
    """The variant's code on the current device, whose number is `index`."""
    major, minor = torch.cuda.get_device_capability(index)
    code = cubin(variant, 10 * major + minor)
    module = ctypes.c_void_p()
    _check(_driver().cuModuleLoadData(ctypes.byref(module), code), f"loading {variant.name} for sm_{major}{minor}")
    return module


@cache
def _function(variant: Variant, entry: str, index: int, shared_bytes: int) -> ctypes.c_void_p:
    function = ctypes.c_void_p()
    module = _module(variant, index)
    _check(_driver().cuModuleGetFunction(ctypes.byref(function), module, entry.encode()), f"finding {entry}")
    if shared_bytes:
        _check(
            _driver().cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, shared_bytes),
            f"giving {entry} {shared_bytes} bytes of shared memory",
        )
    return function


def launch(
    variant: Variant,
    entry: str,
    grid: tuple[int, int, int],
    threads: int,
    shared_bytes: int,
    params: ctypes.Structure,
    device: torch.device,
) -> None:
    """Queues the kernel `entry` of `variant`, whose only argument is the structure `params`. The first launch of a
    variant in a process compiles or loads it, which must not happen while a CUDA graph is captured."""
    with torch.cuda.device(device):
        if not hasattr(_thread, "is_bound"):
            # A thread that has made no call of the CUDA runtime yet has no context for the driver to work in.
            torch.cuda.mem_get_info()
            _thread.is_bound = True
        function = _function(variant, entry, torch.cuda.current_device(), shared_bytes)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        _check(
            _driver().cuLaunchKernel(function, *grid, threads, 1, 1, shared_bytes, stream, arguments, None),
            f"launching {entry}",
        )
