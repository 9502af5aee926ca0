"""One compilation of a kernel without a GPU: what a module that defines kernels lists in `AOT`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class AotCase:
    """A kernel with the types and constants that one model shape gives it."""

    name: str
    fn: Any  # the kernel, as `triton.jit` returns it
    signature: dict[str, str]  # argument -> type, such as "*bf16", "i32", "fp32" or "constexpr"
    constexprs: dict[str, Any]
    num_warps: int
    num_stages: int
    is_matmul: bool  # whether tensor-core instructions are expected
