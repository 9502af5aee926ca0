"""This machine's limits, measured: matrix product rate and memory bandwidth. The yardstick for every other figure."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_SECONDS = 0.5  # of measuring, each


@dataclass(frozen=True, slots=True)
class Limits:
    flops: float  # multiply-adds count as two, per second
    bytes_per_second: float  # read and written by a copy
    dtype: str = "float32"  # of the matrix product

    def render(self) -> str:
        rate, copy = self.flops / 1e9, self.bytes_per_second / 1e9
        return f"{rate:,.0f} GFLOP/s ({self.dtype} matrix product), {copy:,.1f} GB/s (copy)"


def measure_limits() -> Limits:
    """Takes about two seconds. Uses all threads that PyTorch uses."""
    import torch

    from batchjob.engine.model.fuse import pack_linear

    rows, width = 512, 1024
    linear = torch.nn.Linear(width, width, bias=False)
    rates = [_rate(torch.nn.functional.linear, torch.randn(rows, width), linear.weight)]
    packed = pack_linear(linear)
    if packed is not None:
        rates.append(_rate(packed, torch.randn(rows, width)))
    source = torch.empty(64 * 2**20, dtype=torch.float32)
    target = torch.empty_like(source)
    source.zero_()
    copies = _rate(target.copy_, source)
    return Limits(
        flops=max(rates) * 2 * rows * width * width,
        bytes_per_second=copies * 2 * source.numel() * source.element_size(),
    )


def measure_device_limits(device: torch.device, *, small: bool = False) -> Limits:
    """The same of a device, in bfloat16 and with sizes that fill a GPU: takes about a second and 3 GiB. `small` sizes
    only show that it works."""
    import torch

    from batchjob.bench.gpu_timing import seconds_per_call

    numbers, widths = (2**18, (64,)) if small else (2**29, (4096, 8192))
    source = torch.zeros(numbers, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    copy = seconds_per_call([lambda: target.copy_(source)], device).seconds
    flops = 0.0
    for width in widths:
        left, right = torch.randn(2, width, width, device=device).to(torch.bfloat16)
        out = torch.empty_like(left)
        product = seconds_per_call([partial(torch.mm, left, right, out=out)], device).seconds
        flops = max(flops, 2 * width**3 / product)
    return Limits(flops, 2 * source.numel() * source.element_size() / copy, "bfloat16")


def _rate(function: Callable[..., object], *args: object) -> float:
    """Calls per second: the best of three runs, since other work on the machine only ever slows one down."""
    import torch

    with torch.inference_mode():
        function(*args)
        best = 0.0
        for _ in range(3):
            calls, started = 0, time.perf_counter()
            while (elapsed := time.perf_counter() - started) < _SECONDS / 3:
                function(*args)
                calls += 1
            best = max(best, calls / elapsed)
    return best
