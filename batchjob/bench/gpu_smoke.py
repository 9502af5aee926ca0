"""Does anything work at all: device, versions, limits, one call of each kernel against the reference, a tiny model."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from batchjob.bench.gpu_shapes import SHAPES, build
from batchjob.bench.gpu_task import Report, Task
from batchjob.bench.limits import measure_device_limits
from batchjob.bench.workload import NoText, Row, add_rows
from batchjob.engine import Engine, EngineConfig
from batchjob_kernels import AttnMeta, DeviceLens, Requirements, reference, reference_ops
from batchjob_kernels.select import BACKENDS, backend

# Largest difference that is still called equal, as a share of the largest expected number.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.02}


def smoke(task: Task, report: Report) -> None:
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
    for name in ("torch", "triton", "transformers", "numpy", "pyarrow", "accelerate", "pytest", "hypothesis"):
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


def requirements(name: str, device: torch.device, dtype: torch.dtype, *, head_dim: int, group: int) -> Requirements:
    return Requirements(
        device=device,
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        dtype=dtype,
        kv_dtype=dtype,
        head_dims=frozenset({head_dim}),
        group_sizes=frozenset({group}),
        block_size=block_size_for(name),
    )


def block_size_for(name: str) -> int:
    """The block size at which a backend is measured: the default, or the smallest it serves."""
    return 256 if name == "flash" else 16


def _kernel_checks(task: Task) -> dict[str, Callable[[], Any]]:
    device, dtype = task.torch_device, getattr(torch, task.dtype_name)
    head_dim = 32 if task.tiny else 128
    checks: dict[str, Callable[[], Any]] = {}
    for name in ("triton", "flash", "cuda", "gather"):
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
        meta.plans.clear()
    return _compare(*results)


def step_meta(
    query_lens: list[int],
    kv_lens: list[int],
    block_size: int,
    device: torch.device,
    blocks: Tensor | None = None,
) -> tuple[AttnMeta, int]:
    """One step with its lengths on the device, and how many blocks it has. `blocks` int [at least as many] are theirs
    in order; by default they are scattered over the cache."""
    counts = [-(-length // block_size) for length in kv_lens]
    total = sum(counts)
    if blocks is None:
        blocks = torch.randperm(total, generator=torch.Generator().manual_seed(2))
    table = torch.full((len(kv_lens), max(counts)), total, dtype=torch.int32)
    starts = [0]
    for row, count in enumerate(counts):
        table[row, :count] = blocks[sum(counts[:row]) : sum(counts[:row]) + count]
    for length in query_lens:
        starts.append(starts[-1] + length)
    slots = [
        int(table[row, position // block_size]) * block_size + position % block_size
        for row, (query_len, kv_len) in enumerate(zip(query_lens, kv_lens, strict=True))
        for position in range(kv_len - query_len, kv_len)
    ]
    as_int32: dict[str, Any] = {"dtype": torch.int32, "device": device}
    meta = AttnMeta(
        query_lens=query_lens,
        kv_lens=kv_lens,
        block_table=table.to(device),
        slots=torch.tensor(slots, device=device),
        block_size=block_size,
        device_lens=DeviceLens(
            torch.tensor(starts, **as_int32),
            torch.tensor(kv_lens, **as_int32),
            torch.arange(len(kv_lens), **as_int32),
        ),
    )
    return meta, total


def ops_for(device: torch.device) -> ModuleType:
    """The fused operations: Triton's, on any device where they can run."""
    from batchjob_kernels import triton_ops

    return triton_ops


def op_inputs(
    label: str, num_tokens: int, device: torch.device, dtype: torch.dtype, *, hidden: int, intermediate: int,
    heads: int, kv_heads: int, head_dim: int,
) -> tuple[Callable[[ModuleType], Any], int]:  # fmt: skip
    """A call of one fused operation with random numbers, and the bytes that it must read and write."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    size = dtype.itemsize
    if label in ("rms_norm", "add_rms_norm"):
        x, residual, weight = draw(num_tokens, hidden), draw(num_tokens, hidden), draw(hidden)
        if label == "rms_norm":
            return lambda ops: ops.rms_norm(x, weight, 1e-6), 2 * x.numel() * size
        return lambda ops: ops.add_rms_norm(x, residual, weight, 1e-6), 4 * x.numel() * size
    if label == "act_and_mul":
        gate_up = draw(num_tokens, 2 * intermediate)
        return lambda ops: ops.act_and_mul(gate_up, "silu"), 3 * num_tokens * intermediate * size
    if label != "rotary_write":
        raise KeyError(label)
    qkv = draw(num_tokens, heads + 2 * kv_heads, head_dim)
    angles = torch.rand(num_tokens, head_dim // 2, generator=generator, device=device) * 6
    cos, sin = (torch.cat((part, part), dim=1).to(dtype) for part in (angles.cos(), angles.sin()))
    q_norm, k_norm = draw(head_dim), draw(head_dim)
    meta, num_blocks = step_meta([num_tokens], [num_tokens], 16, device)
    cache = torch.zeros(num_blocks + 1, 2, kv_heads, 16, head_dim, dtype=dtype, device=device)

    def rotary_write(ops: ModuleType) -> Any:
        q = ops.rotary_write(qkv, cos, sin, cache, meta, num_heads=heads, q_norm=q_norm, k_norm=k_norm, eps=1e-6)
        return q, cache

    return rotary_write, 2 * qkv.numel() * size + 2 * cos.numel() * size


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


SAMPLERS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "random": {"temperature": 0.8},
    "filtered": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "penalised": {"temperature": 0.8, "repetition_penalty": 1.2, "presence_penalty": 0.5},
}


def make_sampler(
    settings: dict[str, Any], count: int, vocab_size: int, device: torch.device, *, use_triton: bool
) -> Callable[[Tensor], Tensor]:
    """Draws for `count` rows with these settings: logits [count, vocab_size] -> tokens."""
    from batchjob.core.sequence import Sequence
    from batchjob.engine.device_sampler import DeviceSampler
    from batchjob.records import Request
    from batchjob.sampling import SamplingParams

    sampler = DeviceSampler(vocab_size, (), max_num_seqs=count, device=device, use_triton=use_triton)
    for row in range(count):
        params = SamplingParams(**settings, max_tokens=100, ignore_eos=True)
        seq = Sequence(Request(row, 0, [3, 4, 5], params, stream=row), 200)
        seq.slot = row
        sampler.admit(seq)
    sampler.upload()
    rows = torch.arange(count, device=device)
    num_output_tokens = torch.zeros(count, dtype=torch.int32, device=device)
    return lambda logits: sampler.sample(logits, sampler.mode, rows, num_output_tokens)


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
