"""Seconds of work on a device without the host's part: calls are captured in a CUDA graph, replayed between events."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

_LEAST_SECONDS = 0.02  # of one measurement
_MEASUREMENTS = 3


@dataclass(frozen=True, slots=True)
class Timing:
    seconds: float  # per call
    in_graph: bool  # without one, short calls show the time of their launch


@torch.inference_mode()
def seconds_per_call(calls: Sequence[Callable[[], object]], device: torch.device) -> Timing:
    """Mean of all calls, one after the other, in the best of three measurements. On a CPU, by the clock."""
    if device.type != "cuda":
        for call in calls:
            call()
        started = time.perf_counter()
        for call in calls:
            call()
        return Timing((time.perf_counter() - started) / len(calls), False)
    replay, in_graph = _capture(calls)
    once = _elapsed(replay, 1)
    times = max(1, min(1000, int(_LEAST_SECONDS / max(once, 1e-7))))
    best = min(_elapsed(replay, times) for _ in range(_MEASUREMENTS))
    return Timing(best / len(calls), in_graph)


def _capture(calls: Sequence[Callable[[], object]]) -> tuple[Callable[[], object], bool]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:  # compiles, and settles what is worked out once
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()

    def run() -> None:
        for call in calls:
            call()

    graph = torch.cuda.CUDAGraph()
    current = torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph):
            run()
    except RuntimeError:
        torch.cuda.set_stream(current)  # a capture that fails leaves its own one
        torch.cuda.synchronize()
        return run, False
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay, True


def _elapsed(run: Callable[[], object], times: int) -> float:
    """Seconds per run, by the device's clock."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000 / times
