"""`AotCase`: what a module of kernels names in its list `AOT`, for `python -m batchjob_kernels.aot` to compile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class AotCase:
    """One kernel with the types and constants of one use.

    `signature` gives every argument's Triton type ("*bf16", "i32", "fp32"; those in `constexprs` may be left out).
    Pointers and integers are taken to be divisible by 16 unless named in `unaligned`, as Triton finds them at launch.
    """

    name: str
    fn: Any  # a `triton.jit` function
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    is_matmul: bool = False  # tensor-core instructions are asked for
    min_capability: int = 80  # 89: the 8-bit float types that Triton knows from there on
    max_capability: int = 999
    unaligned: frozenset[str] = frozenset()
    wide_loads: bool = True  # 16-byte loads from global memory are asked for
    quick: bool = False  # one of the few that the ordinary test run compiles
