"""Kernels alone, against what the device can do: bytes per second, and products per second.

Caches are larger than the device's own and calls take turns in them, so that keys and values come from memory.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from batchjob.bench.gpu_engine import shape_of
from batchjob.bench.gpu_inputs import (
    SAMPLERS,
    block_size_for,
    make_sampler,
    op_inputs,
    ops_for,
    requirements,
    step_meta,
)
from batchjob.bench.gpu_shapes import Shape
from batchjob.bench.gpu_task import Report, Task
from batchjob.bench.gpu_timing import seconds_per_call
from batchjob_kernels.attention.select import backend

_POOL_TOKENS = 1 << 20  # 4 GiB of keys and values in Qwen3's layers
_MAX_TURNS = 32
# (sequences, tokens of context), the telling ones first: the rest falls away when time runs short.
_DECODE = ((256, 1024), (64, 4096), (8, 8192), (1, 32768), (256, 4096), (32, 1024), (8, 1024), (1, 4096))
# (sequences, new tokens of each, tokens before them).
_PREFILL = ((8, 1024, 0), (1, 8192, 0), (16, 512, 0), (1, 2048, 6144), (4, 512, 4096))
_TINY_DECODE, _TINY_PREFILL = ((2, 40), (3, 17)), ((1, 24, 0), (2, 5, 9))


def attention(task: Task, report: Report) -> None:
    """Options: `shape`, `backend`."""
    shape, device = shape_of(task), task.torch_device
    dtype = getattr(torch, task.dtype_name)
    name = task.options["backend"]
    need = requirements(name, device, dtype, head_dim=shape.head_dim, group=shape.num_heads // shape.num_kv_heads)
    refusal = backend(name).refusal(need)
    if refusal is not None:
        report.add(**{name: f"refused: {refusal}"})
        return
    bench = _Attention(name, shape, task, dtype)
    points = [
        (f"decode {batch} x {context}", [1] * batch, [context] * batch)
        for batch, context in (_TINY_DECODE if task.tiny else _DECODE)
    ]
    prefills = () if name == "gather" else _TINY_PREFILL if task.tiny else _PREFILL
    for index, (batch, new, before) in enumerate(prefills):
        label = f"prefill {batch} x {new}" + (f" after {before}" if before else "")
        points.insert(3 * index + 2, (label, [new] * batch, [new + before] * batch))  # among the decodes
    found: dict[str, Any] = {}
    for label, query_lens, kv_lens in points:
        if report.seconds_left < 3:
            report.add(note="the other points were left out for lack of time")
            break
        found[label] = bench.measure(query_lens, kv_lens)
        report.add(**{name: found})


class _Attention:
    def __init__(self, name: str, shape: Shape, task: Task, dtype: torch.dtype) -> None:
        self._module, self._shape, self._limits, self._device = backend(name), shape, task.limits, task.torch_device
        self._block_size = block_size_for(name)
        self._num_blocks = (1 << 10 if task.tiny else _POOL_TOKENS) // self._block_size
        size = (self._num_blocks + 1, 2, shape.num_kv_heads, self._block_size, shape.head_dim)
        self._cache = torch.empty(size, dtype=dtype, device=self._device).normal_()
        self._order = torch.randperm(self._num_blocks, generator=torch.Generator().manual_seed(0))

    def measure(self, query_lens: list[int], kv_lens: list[int]) -> Any:
        """Microseconds, and the share of the measured limits; the reason where it fails."""
        try:
            return self._measure(query_lens, kv_lens)
        except (RuntimeError, ValueError, AssertionError) as error:
            if "CUDA error" in str(error):  # nothing works after it
                raise
            return f"failed: {error}"[:300]

    def _measure(self, query_lens: list[int], kv_lens: list[int]) -> dict[str, Any]:
        shape, needed = self._shape, sum(-(-length // self._block_size) for length in kv_lens)
        most = 1 if self._device.type == "cpu" else _MAX_TURNS if max(query_lens) == 1 else 4
        turns = min(most, max(1, self._num_blocks // needed))
        q = torch.randn(sum(query_lens), shape.num_heads, shape.head_dim, device=self._device).to(self._cache.dtype)
        calls = []
        for turn in range(turns):
            blocks = self._order[turn * needed : (turn + 1) * needed]
            meta, _ = step_meta(query_lens, kv_lens, self._block_size, self._device, blocks)
            calls.append(
                lambda meta=meta: self._module.paged_attention(q, None, self._cache, meta, scale=shape.head_dim**-0.5)
            )
        timing = seconds_per_call(calls, self._device)
        # Of pairs of query and key, the causal half.
        pairs = sum(new * (total - new) + new * (new + 1) // 2 for new, total in zip(query_lens, kv_lens, strict=True))
        flops = 4 * shape.num_heads * shape.head_dim * pairs / timing.seconds
        bandwidth = sum(kv_lens) * shape.num_kv_heads * shape.head_dim * 2 * self._cache.element_size() / timing.seconds
        result = {
            "us": timing.seconds * 1e6,
            "kv_gb_s": bandwidth / 1e9,
            "tflop_s": flops / 1e12,
            "in_graph": timing.in_graph,
        }
        if self._limits is not None:
            result["of_copy"] = bandwidth / self._limits.bytes_per_second
            result["of_product"] = flops / self._limits.flops
        return result


def others(task: Task, report: Report) -> None:
    """Norms, activation, rotary embedding with the KV write, and the sampler. Options: `shape`."""
    shape, device, limits = shape_of(task), task.torch_device, task.limits
    dtype = getattr(torch, task.dtype_name)
    sizes = (3,) if task.tiny else (256, 8192)

    def measured(seconds: float, num_bytes: int) -> dict[str, float]:
        result = {"us": seconds * 1e6, "gb_s": num_bytes / seconds / 1e9}
        return result if limits is None else {**result, "of_copy": num_bytes / seconds / limits.bytes_per_second}

    def op(label: str, num_tokens: int) -> dict[str, float]:
        call, num_bytes = op_inputs(
            label, num_tokens, device, dtype, hidden=shape.hidden_size, intermediate=shape.intermediate_size,
            heads=shape.num_heads, kv_heads=shape.num_kv_heads, head_dim=shape.head_dim,
        )  # fmt: skip
        ops = ops_for(device)
        return measured(seconds_per_call([lambda: call(ops)], device).seconds, num_bytes)

    def sampler(settings: dict[str, Any], num_rows: int) -> dict[str, float]:
        logits = torch.randn(num_rows, shape.vocab_size, device=device).to(dtype)
        draw = make_sampler(settings, num_rows, shape.vocab_size, device, use_triton=True)
        seconds = seconds_per_call([lambda: draw(logits)], device).seconds
        return measured(seconds, logits.numel() * logits.element_size())

    for label in ("rms_norm", "add_rms_norm", "act_and_mul", "rotary_write"):
        for num_tokens in sizes:
            if report.seconds_left > 2:
                report.attempt(f"{label} {num_tokens}", partial(op, label, num_tokens))
    for label, settings in SAMPLERS.items():
        if report.seconds_left > 2:
            report.attempt(f"sampler {label} {sizes[0]}", partial(sampler, settings, sizes[0]))
