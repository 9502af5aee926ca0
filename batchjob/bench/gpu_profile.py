"""Splits the time of a decode step: kernels by kind, and the gaps between them in which the device waits."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import torch

from batchjob.bench.gpu_bound import step_work
from batchjob.bench.gpu_shapes import Shape
from batchjob.bench.gpu_task import Report, Task
from batchjob.bench.workload import Row, add_rows
from batchjob.engine import Engine

_STEPS = 24
# Parts of kernels' names, in the order in which they are looked for.
_KINDS = {
    "attention": ("attention", "merge_kernel", "batchjob_", "paged", "flash", "fmha", "write_kv"),
    "sampling": (
        "groups_kernel",
        "bounds_kernel",
        "draw_kernel",
        "penalise",
        "ended",
        "argmax",
        "softmax",
        "multinomial",
    ),
    "norms, rotary, activation": ("rms_norm", "rotary", "act_and_mul", "silu", "rsqrt"),
    "linear": ("gemm", "nvjet", "cutlass", "cublas", "xmma", "gemv", "splitk", "aten::mm", "addmm", "linear", "mkldnn"),
    "copies": ("memcpy", "memset", "copy_"),
}


def kind_of(kernel: str) -> str:
    name = kernel.lower()
    return next((kind for kind, parts in _KINDS.items() if any(part in name for part in parts)), "other")


def profile_decode(engine: Engine, rows: list[Row], task: Task, report: Report, shape: Shape) -> dict[str, Any]:
    """Profiles steps in which as many rows as may run decode, each about in the middle of its output."""
    length = max(8, min(512, max(len(row.token_ids) for row in rows)))
    count = min(engine.capacity.max_num_seqs, len(rows))
    steps = 3 if task.tiny else _STEPS
    steps_per_launch = task.settings.get("decode_steps_per_launch", 1)
    room = (2 * steps + 16) * steps_per_launch
    add_rows(engine, [Row([7 + i % 400, *range(3, 2 + length)], room) for i in range(count)], temperature=0.6)
    while engine.num_waiting and report.seconds_left > 2:
        engine.step()
    for _ in range(4):
        engine.step()
    seconds = _timed(engine, steps, task)
    activity = torch.profiler.ProfilerActivity
    activities = [activity.CPU] if task.device == "cpu" else [activity.CUDA, activity.CPU]
    with torch.profiler.profile(activities=activities) as profiler:
        _timed(engine, steps, task)
    names = _device_microseconds(profiler, is_cpu=task.device == "cpu")
    launches = steps * steps_per_launch
    kinds: Counter[str] = Counter()
    for name, microseconds in names.items():
        kinds[kind_of(name)] += microseconds / launches
    step = seconds / launches * 1e6
    busy = sum(kinds.values())
    result: dict[str, Any] = {
        "sequences": count,
        "context": length,
        "step_us": step,
        "kernels_us": dict(kinds.most_common()),
        "gaps_us": max(0.0, step - busy),
        "largest_us": {name[:120]: value / launches for name, value in names.most_common(25)},
    }
    if task.limits is not None:
        tokens = count * (length + 5 + steps // 2)
        flops, num_bytes = step_work(shape, tokens=count, sampled=count, pairs=tokens, read=tokens)
        result["bound_us"] = 1e6 * max(flops / task.limits.flops, num_bytes / task.limits.bytes_per_second)
    engine.drop_waiting()
    engine.drop_running()
    while engine.has_unfinished():
        engine.step()
    return result


def _timed(engine: Engine, steps: int, task: Task) -> float:
    if task.device != "cpu":
        torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        engine.step()
    if task.device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _device_microseconds(profiler: torch.profiler.profile, *, is_cpu: bool) -> Counter[str]:
    """Microseconds by kernel; on a CPU, by operation without those inside it."""
    total: Counter[str] = Counter()
    for event in profiler.events() or ():
        if is_cpu:
            total[event.name] += event.self_cpu_time_total
        elif event.device_type.name == "CUDA":
            total[event.name] += event.time_range.elapsed_us()
    return total
