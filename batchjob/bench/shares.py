"""Splits a run's time: matrix products, attention, other work of the model, host code. Measured by wrapping."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from batchjob.engine.model.attention_hook import StepContext
from batchjob.engine.model.packed_linear import PackedLinear
from batchjob.engine.sampling.sampler import Sampler


@dataclass(slots=True)
class Shares:
    """Seconds, and the multiply-adds (counted as two) of linear layers."""

    linear: float = 0.0
    attention: float = 0.0
    sampling: float = 0.0
    flops: float = 0.0

    def render(self, total: float, runner: float) -> str:
        """`total` is of the whole run, `runner` the part of it inside the runner."""
        rest = runner - self.linear - self.attention - self.sampling
        parts = {
            "matrix products": self.linear,
            "attention": self.attention,
            "sampling": self.sampling,
            "rest of the model": rest,
            "host": total - runner,
        }
        return ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in parts.items())


@contextmanager
def measure_shares() -> Iterator[Shares]:
    """Counts what runs inside the block. Costs a few microseconds per call; CPU only, where calls are synchronous."""
    shares = Shares()
    with (
        _timed(PackedLinear, "forward", shares, "linear"),
        _timed(PackedLinear, "activated", shares, "linear"),
        _timed(PackedLinear, "added", shares, "linear"),
        _timed(PackedLinear, "multiplied", shares, "linear"),
        _timed(torch.nn.Linear, "forward", shares, "linear"),
        _timed(StepContext, "attend", shares, "attention"),
        _timed(Sampler, "sample", shares, "sampling"),
    ):
        yield shares


@contextmanager
def _timed(owner: type, name: str, shares: Shares, kind: str) -> Iterator[None]:
    original = getattr(owner, name)

    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        result = original(self, *args, **kwargs)
        setattr(shares, kind, getattr(shares, kind) + time.perf_counter() - started)
        if kind == "linear":
            shares.flops += 2 * (args[0].numel() // self.in_features) * self.in_features * self.out_features
        return result

    setattr(owner, name, wrapper)
    try:
        yield
    finally:
        setattr(owner, name, original)
