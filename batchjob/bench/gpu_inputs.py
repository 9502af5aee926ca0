"""Inputs of kernels: steps over a paged cache, the tensors of a layer, rows with sampling settings."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from batchjob_kernels import AttnMeta, DeviceLens, Requirements

SAMPLERS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "random": {"temperature": 0.8},
    "filtered": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "penalised": {"temperature": 0.8, "repetition_penalty": 1.2, "presence_penalty": 0.5},
}


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
    slot_mapping = [
        int(table[row, position // block_size]) * block_size + position % block_size
        for row, (query_len, kv_len) in enumerate(zip(query_lens, kv_lens, strict=True))
        for position in range(kv_len - query_len, kv_len)
    ]
    as_int32: dict[str, Any] = {"dtype": torch.int32, "device": device}
    meta = AttnMeta(
        query_lens=query_lens,
        kv_lens=kv_lens,
        block_table=table.to(device),
        slot_mapping=torch.tensor(slot_mapping, device=device),
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
    from batchjob_kernels.ops import triton as triton_ops

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


def make_sampler(
    settings: dict[str, Any], count: int, vocab_size: int, device: torch.device, *, use_triton: bool
) -> Callable[[Tensor], Tensor]:
    """Draws for `count` rows with these settings: logits [count, vocab_size] -> tokens."""
    from batchjob.core.sequence import Sequence
    from batchjob.engine.sampling.sampler import Sampler
    from batchjob.records import Request
    from batchjob.sampling import SamplingParams

    sampler = Sampler(vocab_size, (), max_num_seqs=count, device=device, use_triton=use_triton)
    seqs = []
    for row in range(count):
        params = SamplingParams(**settings, max_tokens=100, ignore_eos=True)
        seq = Sequence(Request(row, 0, [3, 4, 5], params, stream=row), 200)
        seq.slot = row
        seqs.append(seq)
    sampler.prepare(seqs, list(range(count)))
    slots = torch.arange(count, device=device)
    num_output_tokens = torch.zeros(count, dtype=torch.int32, device=device)
    return lambda logits: sampler.sample(logits, slots, num_output_tokens)
