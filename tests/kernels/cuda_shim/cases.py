"""Decode steps for the tests of the CUDA kernels: `make_step(case)`, for the reference and for the kernels."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from batchjob_kernels import AttnMeta, DeviceLens
from batchjob_kernels.cuda_build import Variant, decode_variant

HALF, BF16, FULL, FP8 = torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn
# Of a result next to 1: the rounding of the result's own format. Sums are in float32 on both sides.
TOLERANCE = {HALF: 1e-3, BF16: 8e-3, FULL: 2e-5}


@dataclass(frozen=True)
class Case:
    """A decode step. Keys and values are what the cache's format can hold, so both sides see the same numbers."""

    dtype: torch.dtype = FULL
    kv_dtype: torch.dtype = FULL
    head_dim: int = 64
    group: int = 1
    num_kv_heads: int = 2
    block_size: int = 16
    lens: tuple[int, ...] = (1, 15, 16, 17, 31, 32, 33, 129)
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    multiprocessors: int = 1  # more of them: more splits
    padding_rows: int = 0  # rows of length 1 whose block table names the null block only
    tables: str = "lists"  # "slots": lengths on the device, the block table one of all slots
    seed: int = 0

    @property
    def variant(self) -> Variant:
        return decode_variant(self.dtype, self.kv_dtype, self.head_dim, self.group)


@dataclass
class Step:
    q: Tensor
    kv: Tensor
    cache: Tensor
    meta: AttnMeta
    options: dict[str, Any] = field(default_factory=dict)

    def to(self, device: torch.device) -> Step:
        lens = self.meta.device_lens
        if lens is not None:
            lens = DeviceLens(*(getattr(lens, name).to(device) for name in ("query_starts", "kv_lens", "table_rows")))
        meta = replace(
            self.meta,
            block_table=self.meta.block_table.to(device),
            slots=self.meta.slots.to(device),
            device_lens=lens,
            plans={},
        )
        sinks = self.options["sinks"]
        options = {**self.options, "sinks": None if sinks is None else sinks.to(device)}
        return Step(self.q.to(device), self.kv.to(device), self.cache.to(device), meta, options)


def make_step(case: Case) -> tuple[Step, Step]:
    """The step for the reference (lists) and for the kernels (lists, or lengths on the device)."""
    generator = torch.Generator().manual_seed(case.seed)
    lens = [*case.lens, *[1] * case.padding_rows]
    width = max(-(-length // case.block_size) for length in lens) + 1
    num_blocks = width * len(case.lens)
    table = torch.full((len(lens), width), num_blocks, dtype=torch.int32)  # the null block
    table[: len(case.lens)] = torch.randperm(num_blocks, generator=generator).view(-1, width).int()
    for row, length in enumerate(case.lens):
        table[row, -(-length // case.block_size) :] = num_blocks
    shape = (num_blocks + 1, 2, case.num_kv_heads, case.block_size, case.head_dim)
    cache = torch.randn(shape, generator=generator).to(case.kv_dtype)
    num_heads = case.num_kv_heads * case.group
    q = (2 * torch.randn(len(lens), num_heads, case.head_dim, generator=generator)).to(case.dtype)
    options = {
        "scale": case.head_dim**-0.5,
        "window": case.window,
        "softcap": case.softcap,
        "sinks": torch.linspace(-2, 4, num_heads) if case.sinks else None,
    }
    last = torch.tensor(lens) - 1
    slots = table[torch.arange(len(lens)), last // case.block_size] * case.block_size + last % case.block_size
    kv = torch.zeros(len(lens), 2, case.num_kv_heads, case.head_dim, dtype=case.dtype)
    meta = AttnMeta([1] * len(lens), lens, table, slots.long(), case.block_size)
    plain = Step(q.float(), kv.float(), cache.float(), meta, options)
    if case.tables == "slots":
        rows = torch.randperm(3 * len(lens), generator=generator)[: len(lens)].int()
        all_slots = torch.full((3 * len(lens), width + 2), num_blocks, dtype=torch.int32)
        all_slots[rows.long(), :width] = table
        starts = torch.arange(len(lens) + 1, dtype=torch.int32)
        device_lens = DeviceLens(starts, torch.tensor(lens, dtype=torch.int32), rows)
        # The host's lengths are placeholders in a captured graph.
        meta = AttnMeta(
            [1] * len(lens), [1] * len(lens), all_slots, slots.long(), case.block_size, device_lens=device_lens
        )
    return plain, Step(q, kv, cache, meta, options)


def error_of(case: Case, expected: Tensor, actual: Tensor) -> float:
    """Largest difference, relative to the largest number of the same head's output."""
    return float(((actual.float() - expected).abs() / expected.abs().amax(dim=2, keepdim=True)).max())
