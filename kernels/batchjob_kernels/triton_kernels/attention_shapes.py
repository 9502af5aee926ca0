"""Launch parameters of the attention kernel: how large a tile is, how many warps work on it, how many parts the keys
are cut into. Chosen for Hopper by shared memory and registers (see the table of `batchjob_kernels.aot`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

# Where nothing else is to be considered, programs per multiprocessor: about two rounds of two that run side by side.
PROGRAMS_PER_MULTIPROCESSOR = 8
MAX_SPLITS = 64
# Keys that one split reads at least: fewer, and storing and merging its result costs as much as reading them.
MIN_SPLIT_KEYS = 256

Kind = Literal["decode", "mixed", "prompts", "deterministic"]


@dataclass(frozen=True, slots=True)
class Shape:
    rows: int  # BLOCK_M: query rows (tokens x heads of a group)
    keys: int  # BLOCK_N
    num_warps: int
    num_stages: int  # how far loads run ahead; half of it goes to the block table, which the others wait for
    free_of_masks: bool = False  # tiles that all rows see entirely go through a loop of their own, without masks


def power_of_two(number: int) -> int:
    """The smallest power of two that is no less."""
    return 1 << max(number - 1, 0).bit_length()


def dim_pad(head_dim: int) -> int:
    """The width of a tile: a power of two, and no less than a tensor-core instruction takes."""
    return max(16, power_of_two(head_dim))


def choose_shape(kind: Kind, head_dim: int, group: int, itemsize: int, capability: tuple[int, int]) -> Shape:
    """The tile for one use. `itemsize` is in bytes, of the queries; `capability` of the device.

    "decode" has one row per sequence and is bound by memory: few rows, many bytes on their way. "prompts" is bound by
    arithmetic: many rows. "mixed" holds both. "deterministic" serves all of them with one shape.
    """
    width = dim_pad(head_dim)
    row_bytes = width * itemsize
    roomy = capability[0] in (8, 9, 10) and capability not in ((8, 6), (8, 7), (8, 9))  # 160 KiB of shared memory
    keys = 64 if row_bytes <= 256 else 32 if row_bytes <= 1024 else 16
    if kind == "decode":
        shape = Shape(16, keys, num_warps=4, num_stages=5 if roomy else 3)
    elif itemsize == 4:
        edge = 32 if width <= 128 else 16
        shape = Shape(edge, edge, num_warps=4, num_stages=3)
    else:
        if capability[0] == 8 and width == 128:
            keys = 32  # the results of warp-wide products lie in registers: 64 do not fit
        many = kind == "prompts" and width <= 128
        rows = 128 if many else 64 if width <= 256 else 32
        num_warps = 8 if many or width >= 256 else 4
        shape = Shape(rows, keys, num_warps, num_stages=3, free_of_masks=kind != "deterministic")
    return replace(shape, rows=max(shape.rows, power_of_two(group)))


def choose_splits(num_programs: int, multiprocessors: int) -> int:
    """Parts to cut every tile's keys into, so that the device is full: from what is known before any length is."""
    wanted = PROGRAMS_PER_MULTIPROCESSOR * multiprocessors
    return max(1, min(MAX_SPLITS, wanted // max(num_programs, 1)))
