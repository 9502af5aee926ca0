"""The uses of the attention kernel to compile ahead of time: what `attention.triton` launches for common models."""

from __future__ import annotations

from typing import Any

from batchjob_kernels.triton_kernels import attention_shapes as shapes
from batchjob_kernels.triton_kernels.aot_case import AotCase
from batchjob_kernels.triton_kernels.attention import attention_kernel

_POINTERS = ("block_table", "table_rows", "query_starts", "kv_lens", "begins", "tiles", "contexts")
_NUMBERS = ("stride_q", "stride_table", "num_tokens", "first_part", "window")


def _cases(
    kind: shapes.Kind,
    dtype: str,
    head_dim: int,
    group: int,
    *,
    cache: str | None = None,
    split: bool = False,
    shared: bool = False,
    window: bool = False,
    softcap: bool = False,
    sinks: bool = False,
    quick: bool = False,
) -> list[AotCase]:
    """One case for each capability, since the shape of a tile differs."""
    words = [
        f"attention {kind} {dtype} d{head_dim} g{group}",
        "" if cache is None else f"{cache} cache",
        *(word for word, said in (("split", split), ("shared", shared), ("window", window)) if said),
        *(word for word, said in (("softcap", softcap), ("sinks", sinks)) if said),
    ]
    cases = []
    for capability in (80, 89, 90, 100):
        itemsize = 4 if dtype == "fp32" else 2
        shape = shapes.choose_shape(kind, head_dim, group, itemsize, divmod(capability, 10))
        partial = split or shared
        missing = {"begins": not shared, "contexts": not shared, "tiles": kind == "decode", "lse": not partial}
        missing |= {"sinks": not sinks}
        constexprs: dict[str, Any] = {
            "NUM_KV_HEADS": 8,
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "DIM_PAD": shapes.dim_pad(head_dim),
            "BLOCK_SIZE": 16,
            "BLOCK_M": shape.rows,
            "BLOCK_N": shape.keys,
            "SPLIT": split,
            "MIN_SPLIT_TILES": shapes.MIN_SPLIT_KEYS // shape.keys,
            "HAS_WINDOW": window,
            "HAS_SOFTCAP": softcap,
            "PARTIAL": partial,
            "SHARED": shared,
            "FREE_OF_MASKS": shape.free_of_masks,
            **{name: None for name, is_missing in missing.items() if is_missing},
        }
        signature = {
            "q": f"*{dtype}",
            "cache": f"*{cache or dtype}",
            "out": "*fp32" if partial else f"*{dtype}",
            "lse": "*fp32",
            "sinks": f"*{dtype}",
            **dict.fromkeys(_POINTERS, "*i32"),
            **dict.fromkeys(_NUMBERS, "i32"),
            "scale": "fp32",
            "cap": "fp32",
        }
        cases.append(
            AotCase(
                name=", ".join(filter(None, words)),
                fn=attention_kernel,
                signature={name: what for name, what in signature.items() if name not in constexprs},
                constexprs=constexprs,
                num_warps=shape.num_warps,
                num_stages=shape.num_stages,
                is_matmul=dtype != "fp32",
                min_capability=capability,
                max_capability=capability,
                quick=quick,
            )
        )
    return [case for case in cases if cache != "fp8e4nv" or case.min_capability >= 89]


AOT: list[AotCase] = [
    case
    for some in (
        _cases("decode", "bf16", 128, 4, quick=True),
        _cases("decode", "bf16", 128, 4, split=True),
        _cases("decode", "bf16", 128, 2),
        _cases("decode", "fp16", 64, 8, sinks=True, window=True),
        _cases("decode", "bf16", 80, 1),
        _cases("decode", "bf16", 96, 1),
        _cases("decode", "bf16", 256, 2, softcap=True),
        _cases("decode", "bf16", 512, 8),
        _cases("decode", "fp32", 128, 4),
        _cases("decode", "bf16", 128, 4, cache="fp8e4nv"),
        _cases("mixed", "bf16", 128, 4, quick=True),
        _cases("mixed", "bf16", 128, 4, split=True),
        _cases("mixed", "bf16", 128, 4, shared=True),
        _cases("mixed", "bf16", 128, 4, cache="fp8e4nv"),
        _cases("mixed", "fp16", 64, 8, sinks=True, window=True),
        _cases("mixed", "bf16", 256, 2, softcap=True),
        _cases("mixed", "bf16", 512, 8),
        _cases("mixed", "fp32", 128, 4),
        _cases("prompts", "bf16", 128, 4, quick=True),
        _cases("prompts", "fp16", 64, 8),
        _cases("prompts", "bf16", 80, 1),
        _cases("prompts", "bf16", 96, 1),
        _cases("prompts", "bf16", 128, 4, cache="fp8e4nv"),
        _cases("deterministic", "bf16", 128, 4),
        _cases("deterministic", "fp16", 64, 8, sinks=True, window=True),
        _cases("deterministic", "fp32", 128, 4),
    )
    for case in some
]
