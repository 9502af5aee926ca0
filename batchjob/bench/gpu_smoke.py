"""Does anything work at all: device, versions, limits, one call of each kernel against the reference, a tiny model."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from batchjob.bench.gpu_inputs import (
    SAMPLERS,
    block_size_for,
    make_sampler,
    op_inputs,
    ops_for,
    requirements,
    step_meta,
)
from batchjob.bench.gpu_shapes import SHAPES, build
from batchjob.bench.gpu_task import Report, Task
from batchjob.bench.limits import measure_device_limits
from batchjob.bench.workload import NoText, Row, add_rows
from batchjob.engine import Engine, EngineConfig
from batchjob_kernels.attention import reference
from batchjob_kernels.attention.select import BACKENDS, backend
from batchjob_kernels.ops import reference as reference_ops

_PACKAGES = (
    "torch triton transformers numpy tokenizers safetensors pyarrow zstandard click jinja2 accelerate pytest".split()
)
# Largest difference that is still called equal, as a share of the largest expected number.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.02}


def smoke(task: Task, report: Report) -> None:
    if task.device != "cpu" and not torch.cuda.is_available():
        report.add(no_gpu=True)
        raise RuntimeError("PyTorch sees no GPU; to rehearse without one: --device cpu --tiny")
    report.attempt("device", lambda: _device(task))
    report.attempt("versions", _versions)
    report.attempt("limits", lambda: _limits(task))
    report.attempt("backends", lambda: refusals(task.torch_device, getattr(torch, task.dtype_name)))
    for name, function in _kernel_checks(task).items():
        report.attempt(f"kernel {name}", function)
    report.attempt("engine", lambda: _engine(task))


def _device(task: Task) -> dict[str, Any]:
    if task.device == "cpu":
        return {"name": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(task.torch_device)
    free, total = torch.cuda.mem_get_info(task.torch_device)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gib": total / 2**30,
        "free_gib": free / 2**30,
        "multiprocessors": properties.multi_processor_count,
        "cpus": os.cpu_count(),
    }


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version(), "cuda": str(torch.version.cuda)}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    return found


def _limits(task: Task) -> dict[str, Any]:
    limits = measure_device_limits(task.torch_device, small=task.tiny)
    return {"flops": limits.flops, "bytes_per_second": limits.bytes_per_second, "dtype": limits.dtype}


def refusals(device: torch.device, dtype: torch.dtype, *, head_dim: int = 128, group: int = 2) -> dict[str, Any]:
    """Name of each backend -> why it cannot serve such a model, or None where it can; with the block size asked for."""
    found: dict[str, Any] = {}
    for name in BACKENDS:
        try:
            found[name] = backend(name).refusal(requirements(name, device, dtype, head_dim=head_dim, group=group))
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def _kernel_checks(task: Task) -> dict[str, Callable[[], Any]]:
    device, dtype = task.torch_device, getattr(torch, task.dtype_name)
    head_dim = 32 if task.tiny else 128
    checks: dict[str, Callable[[], Any]] = {}
    for name in ("triton", "flash", "gather"):
        for query_lens, label in (([1, 1, 1], "decode"), ([5, 1, 40], "mixed")):
            checks[f"{name} {label}"] = partial(_attention, name, query_lens, device, dtype, head_dim)
    fp8 = torch.float8_e4m3fn
    checks["triton decode fp8"] = partial(_attention, "triton", [1, 1, 1], device, dtype, head_dim, fp8)
    for label in ("rms_norm", "add_rms_norm", "act_and_mul", "rotary_write"):
        checks[label] = partial(_op, label, device, dtype, head_dim)
    for label, settings in SAMPLERS.items():
        checks[f"sampler {label}"] = partial(_sampler, settings, device, dtype, *((2, 300) if task.tiny else (6, 5000)))
    return checks


def _attention(
    name: str,
    query_lens: list[int],
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    kv_dtype: torch.dtype | None = None,
) -> str:
    module, heads, kv_heads, block_size = backend(name), 4, 2, block_size_for(name)
    refusal = module.refusal(requirements(name, device, dtype, head_dim=head_dim, group=heads // kv_heads))
    if refusal is not None:
        return f"refused: {refusal}"
    generator = torch.Generator().manual_seed(0)
    kv_lens = [length + extra for length, extra in zip(query_lens, (37, 300, 0), strict=True)]
    meta, num_blocks = step_meta(query_lens, kv_lens, block_size, device)
    shape = (num_blocks + 1, 2, kv_heads, block_size, head_dim)
    caches = [torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device, dtype) for _ in range(2)]
    caches = [cache.to(kv_dtype or dtype) for cache in caches]
    q = torch.randn(sum(query_lens), heads, head_dim, generator=generator).to(device, dtype)
    kv = torch.randn(sum(query_lens), 2, kv_heads, head_dim, generator=generator).to(device, dtype)
    for part, cache in zip((module, reference), caches, strict=True):
        part.write_kv(kv, cache, meta)
    written, expected = (cache[:num_blocks].float() for cache in caches)
    rounding = 0.0
    if kv_dtype is not None:  # one unit in the last place; but Triton's interpreter loses a carry when it rounds to FP8
        rounding = torch.inf if device.type == "cpu" else 0.125
    if not bool(((written - expected).abs() <= rounding * expected.abs().clamp_min(2.0**-9)).all()):
        raise AssertionError("the cache differs from the reference after the write")
    results = []
    for part in (module, reference):
        results.append(part.paged_attention(q, kv, caches[0], meta, scale=head_dim**-0.5))
        meta.memo.clear()
    return _compare(*results)


def _op(label: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    call, _ = op_inputs(
        label, 19, device, dtype, hidden=4 * head_dim, intermediate=5 * head_dim, heads=4, kv_heads=2, head_dim=head_dim
    )
    results = []
    for ops in (ops_for(device), reference_ops):
        result = call(ops)
        parts = result if isinstance(result, tuple) else (result,)
        results.append(torch.cat([part.reshape(-1).float() for part in parts]).to(dtype))
    return _compare(*results)


def _sampler(settings: dict[str, Any], device: torch.device, dtype: torch.dtype, count: int, vocab_size: int) -> str:
    logits = (4 * torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(0))).to(device, dtype)
    ours, plain = (
        make_sampler(settings, count, vocab_size, device, use_triton=use_triton)(logits) for use_triton in (True, False)
    )
    equal = int((ours == plain).sum())
    if equal < len(ours):
        raise AssertionError(f"{len(ours) - equal} of {len(ours)} tokens differ from the plain sampler's")
    return f"{equal} tokens equal"


def _compare(actual: Tensor, expected: Tensor) -> str:
    error = float((actual.float() - expected.float()).abs().max() / expected.float().abs().max())
    if not error <= _TOLERANCE[expected.dtype]:
        raise AssertionError(f"relative error {error:.2g}")
    return f"relative error {error:.1e}"


def _engine(task: Task) -> str:
    """A tiny model in float32, greedy: on the device the tokens of the same model on the CPU."""
    rows = [Row([5 + 3 * i + j for j in range(4 + 3 * i)], 12) for i in range(6)]
    cpu = torch.device("cpu")
    shape = SHAPES["Qwen3-0.6B"].tiny()
    results = []
    for device in (cpu, task.torch_device):
        from batchjob.engine.runner import TorchRunner

        def make(device: torch.device = device) -> torch.nn.Module:
            return build(shape, device=cpu, dtype=torch.float32, std=0.3).to(device)

        config = EngineConfig(
            max_model_len=64,
            max_num_seqs=4,
            kv_cache_bytes=2**22,
            device=str(device),
            async_scheduling=device is not cpu,
        )
        engine = Engine(TorchRunner(make, config), NoText(), config)
        add_rows(engine, rows)
        tokens: dict[int, list[int]] = {}
        while engine.has_unfinished():
            for completion in engine.step():
                tokens[completion.row_index] = list(completion.token_ids)
        results.append(tokens)
    expected, actual = results
    equal = sum(actual.get(row) == tokens for row, tokens in expected.items())
    if equal < len(rows):
        raise AssertionError(f"only {equal} of {len(rows)} rows have the tokens of the CPU: {actual} not {expected}")
    return f"{equal} rows have the tokens of the CPU"
