"""Paged attention by Triton kernels: for CUDA devices from compute capability 8.0 on, and, slowly, for any CPU in
Triton's interpreter (environment variable TRITON_INTERPRET=1 before the first import)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from batchjob_kernels.attention.meta import AttnMeta, Requirements
from batchjob_kernels.triton_kernels import attention_plan as plans
from batchjob_kernels.triton_kernels import attention_shapes as shapes
from batchjob_kernels.triton_kernels import available

USES_DEVICE_LENS = True
COMPILED_FOR_BLOCK_SIZE = True

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 512
MAX_GROUP = 64


def refusal(need: Requirements) -> str | None:
    """The reason why it cannot serve this need, or None."""
    missing = available.problem(need.device)
    if missing is not None:
        return missing
    if need.device.type == "cuda" and (need.capability is None or need.capability < (8, 0)):
        return f"Triton's kernels need compute capability 8.0, the device has {_version(need.capability)}"
    if need.dtype not in _DTYPES:
        return f"no kernel for {need.dtype}: float16, bfloat16 or float32"
    if need.kv_dtype == torch.float8_e4m3fn:
        if need.device.type == "cuda" and need.capability is not None and need.capability < (8, 9):
            return f"an FP8 cache needs compute capability 8.9, the device has {_version(need.capability)}"
    elif need.kv_dtype not in _DTYPES:
        return f"no kernel for a cache of {need.kv_dtype}"
    for head_dim in sorted(need.head_dims):
        if head_dim > MAX_HEAD_DIM or head_dim % 8:
            return f"a head size of {head_dim}: the kernels take multiples of 8 up to {MAX_HEAD_DIM}"
    for group in sorted(need.group_sizes):
        if group > MAX_GROUP:
            return f"{group} query heads per KV head: the kernels take up to {MAX_GROUP}"
    if need.block_size & (need.block_size - 1):
        return f"a block size of {need.block_size} is no power of two"
    return None


def write_kv(kv: Tensor, cache: Tensor, meta: AttnMeta) -> None:
    """As `reference.write_kv`; into an 8-bit cache the largest numbers it holds, where they are exceeded."""
    from batchjob_kernels.triton_kernels.write import write_kv_kernel

    num_tokens, _, num_kv_heads, head_dim = kv.shape
    if not num_tokens:
        return
    rows = kv if kv[0].is_contiguous() else kv.contiguous()
    write_kv_kernel[(num_tokens,)](
        rows,
        cache,
        meta.slot_mapping,
        rows.stride(0),
        NUM_PARTS=2 * num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=meta.block_size,
        PARTS_PAD=shapes.power_of_two(2 * num_kv_heads),
        DIM_PAD=shapes.power_of_two(head_dim),
        num_warps=4,
    )


def paged_attention(
    q: Tensor,
    kv: Tensor | None,
    cache: Tensor,
    meta: AttnMeta,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """As `reference.paged_attention`; `scale` must be positive. `kv` is not used: the cache holds the step's keys."""
    from batchjob_kernels.triton_kernels.merge import merge_kernel, parts_at_once

    if scale <= 0:
        raise ValueError(f"scale must be positive, not {scale}")
    if not len(q):
        return torch.empty_like(q)
    if not q[0].is_contiguous():
        q = q.contiguous()
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = cache.shape[2]
    use = plans.Use(num_kv_heads, num_heads // num_kv_heads, head_dim, q.element_size(), window is None)
    plan = plans.plan(meta, use, q.device)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if plan.num_parts == 1:
        _launch(plan, plan.own, 0, q, cache, out, None, meta, use, scale, window, softcap, sinks)
        return out

    parts = torch.empty(plan.num_parts, num_tokens, num_heads, head_dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(parts.shape[:3], dtype=torch.float32, device=q.device)
    if plan.shared is not None:
        lse[: plan.num_shared_parts].fill_(-torch.inf)  # a row that lies in no context of a level
        _launch(plan, plan.shared, 0, q, cache, parts, lse, meta, use, scale, window, softcap, None)
    _launch(plan, plan.own, plan.num_shared_parts, q, cache, parts, lse, meta, use, scale, window, softcap, None)
    at_once = parts_at_once(plan.num_parts, head_dim)
    width = shapes.power_of_two(head_dim)
    merge_kernel[(num_tokens * num_heads,)](
        parts,
        lse,
        out,
        sinks,
        num_tokens * num_heads,
        plan.num_parts,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        DIM_PAD=width,
        ALL_PAD=shapes.power_of_two(plan.num_parts),
        AT_ONCE=at_once,
        num_warps=max(1, min(4, at_once * width // 512)),
    )
    return out


def _launch(
    plan: plans.Plan,
    launch: plans.Launch,
    first_part: int,
    q: Tensor,
    cache: Tensor,
    out: Tensor,
    lse: Tensor | None,
    meta: AttnMeta,
    use: plans.Use,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    from batchjob_kernels.triton_kernels.attention import attention_kernel

    shape = launch.shape
    factor = scale * math.log2(math.e) if softcap is None else 2 * math.log2(math.e) * scale / softcap
    attention_kernel[(launch.num_tiles * use.num_kv_heads, launch.num_splits)](
        q,
        cache,
        out,
        lse,
        meta.block_table,
        plan.table_rows,
        plan.query_starts,
        plan.kv_lens,
        plan.begins,
        launch.tiles,
        launch.contexts,
        sinks,
        q.stride(0),
        meta.block_table.stride(0),
        q.shape[0],
        first_part,
        window or 0,
        factor,
        0.0 if softcap is None else softcap * math.log2(math.e),
        NUM_KV_HEADS=use.num_kv_heads,
        GROUP=use.group,
        HEAD_DIM=use.head_dim,
        DIM_PAD=shapes.dim_pad(use.head_dim),
        BLOCK_SIZE=meta.block_size,
        BLOCK_M=shape.rows,
        BLOCK_N=shape.keys,
        SPLIT=launch.num_splits > 1,
        MIN_SPLIT_TILES=max(1, shapes.MIN_SPLIT_KEYS // shape.keys),
        HAS_WINDOW=window is not None,
        HAS_SOFTCAP=softcap is not None,
        PARTIAL=lse is not None,
        SHARED=launch.contexts is not None,
        FREE_OF_MASKS=shape.free_of_masks,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )


def _version(capability: tuple[int, int] | None) -> str:
    return "none" if capability is None else f"{capability[0]}.{capability[1]}"
