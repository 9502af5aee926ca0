"""Lengths, tiles and contexts that the launches of one step need: worked out once per step, from the host's lists, and
sent to the device in one transfer."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from batchjob_kernels.attention.meta import AttnMeta, Context
from batchjob_kernels.triton_kernels import attention_shapes as shapes

# Contexts must save the reading of so many keys (of all KV heads): less does not pay for a further launch and a merge.
MIN_SAVED_KEYS = 4096
# Most bytes of partial results: they take memory that the cache could have, and prompts gain little from contexts.
MAX_PARTIAL_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class Use:
    """The shape of a layer's attention, which decides about launches beside the step."""

    num_kv_heads: int
    group: int
    head_dim: int
    itemsize: int  # of the queries
    with_contexts: bool


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """One launch of the attention kernel; its grid is (num_tiles * KV heads, num_splits)."""

    shape: shapes.Shape
    num_tiles: int
    num_splits: int
    tiles: Tensor | None  # int32 [num_tiles, 2]: sequence (or context) and its first row; None: sequence i, one row
    contexts: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    own: Launch  # every row over the keys of its own
    shared: Launch | None  # the rows of contexts over the contexts' keys
    num_shared_parts: int  # results of `shared`, before those of `own`; not every row has every one
    num_parts: int  # 1: no merge
    query_starts: Tensor
    kv_lens: Tensor
    table_rows: Tensor | None
    begins: Tensor | None  # int32 [num_seqs]: where a sequence's own part begins


def plan(meta: AttnMeta, use: Use, device: torch.device) -> Plan:
    """The plan of a step for layers of this use. Kept in `meta`."""
    known: Plan | None = meta.memo.get(use)
    if known is None:
        known = meta.memo[use] = _make(meta, use, device)
    return known


def _make(meta: AttnMeta, use: Use, device: torch.device) -> Plan:
    lens = torch.tensor(meta.query_lens)
    is_decode = bool((lens == 1).all())
    kind = _kind(lens * use.group, is_decode, meta.deterministic)
    capability, multiprocessors = device_facts(device)
    shape = shapes.choose_shape(kind, use.head_dim, use.group, use.itemsize, capability)
    contexts, levels = _contexts(meta, use, len(lens) if is_decode else int(lens.sum()))
    wide = shapes.choose_shape("mixed", use.head_dim, use.group, use.itemsize, capability)

    sent: dict[str, Tensor] = {}
    if not is_decode:
        sent["tiles"] = _tiles(lens, shape.rows // use.group)
    if contexts:
        starts = [0, *lens.cumsum(0).tolist()]
        size = meta.block_size
        sent["contexts"] = torch.tensor(
            [
                (c.first_seq, starts[c.first_seq], starts[c.last_seq], c.first_block * size, c.last_block * size, level)
                for c, level in zip(contexts, levels, strict=True)
            ]
        )
        sent["context_tiles"] = _tiles(sent["contexts"][:, 2] - sent["contexts"][:, 1], wide.rows // use.group)
        sent["begins"] = torch.tensor(meta.first_blocks()) * size
    if meta.device_lens is None:
        sent["query_starts"] = torch.nn.functional.pad(lens.cumsum(0), (1, 0))
        sent["kv_lens"] = torch.tensor(meta.kv_lens)
    at = _send(sent, device)

    def launch(shape: shapes.Shape, tiles: Tensor | None, num_tiles: int, contexts: Tensor | None = None) -> Launch:
        splits = 1 if meta.deterministic else shapes.choose_splits(num_tiles * use.num_kv_heads, multiprocessors)
        return Launch(shape, num_tiles, splits, tiles, contexts)

    own_tiles = at.get("tiles")
    if is_decode and meta.deterministic:
        # One compiled kernel for all steps that must agree in bits. Made on the device: a captured step sends nothing.
        own_tiles = torch.arange(2 * len(lens), dtype=torch.int32, device=device).view(-1, 2) // 2
        own_tiles[:, 1] = 0
    own = launch(shape, own_tiles, len(lens) if own_tiles is None else len(own_tiles))
    shared = None
    if contexts:
        shared = launch(wide, at["context_tiles"], len(at["context_tiles"]), at["contexts"])
    num_shared_parts = shared.num_splits * (1 + max(levels)) if shared else 0
    device_lens = meta.device_lens
    return Plan(
        own,
        shared,
        num_shared_parts,
        num_shared_parts + own.num_splits,
        at["query_starts"] if device_lens is None else device_lens.query_starts,
        at["kv_lens"] if device_lens is None else device_lens.kv_lens,
        None if device_lens is None else device_lens.table_rows,
        at.get("begins"),
    )


def _kind(rows: Tensor, is_decode: bool, deterministic: bool) -> shapes.Kind:
    """The kind of most of the step; `rows` are the query rows per sequence and KV head."""
    if deterministic:
        return "deterministic"
    if is_decode:
        return "decode"
    return "prompts" if int((rows >= 128).sum()) * 2 >= len(rows) else "mixed"


def _contexts(meta: AttnMeta, use: Use, num_tokens: int) -> tuple[list[Context], list[int]]:
    """The contexts to read apart, all or none of them, and how many others each lies within."""
    saved = sum((c.last_seq - c.first_seq - 1) * (c.last_block - c.first_block) for c in meta.contexts)
    wanted = use.with_contexts and not meta.deterministic and saved * meta.block_size >= max(1, MIN_SAVED_KEYS)
    if not wanted:
        return [], []
    depth = [0] * len(meta.query_lens)
    levels = []
    for context in meta.contexts:
        seqs = range(context.first_seq, context.last_seq)
        levels.append(max(depth[seq] for seq in seqs))
        for seq in seqs:
            depth[seq] = levels[-1] + 1
    num_rows = num_tokens * use.num_kv_heads * use.group
    if 4 * num_rows * use.head_dim * (2 + max(levels)) > MAX_PARTIAL_BYTES:
        return [], []
    return meta.contexts, levels


def _tiles(lens: Tensor, tokens_per_tile: int) -> Tensor:
    """Cuts runs of `lens` rows into tiles: [num_tiles, 2], run and first row. Those that read most keys come first."""
    counts = (lens + tokens_per_tile - 1) // tokens_per_tile
    run = torch.repeat_interleave(torch.arange(len(lens)), counts)
    first = torch.arange(len(run)) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    order = first.argsort(descending=True, stable=True)
    return torch.stack((run, first * tokens_per_tile), dim=1)[order]


def _send(tensors: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Each as int32 on the device, by one transfer that the host does not wait for."""
    if not tensors:
        return {}
    flat = torch.cat([tensor.flatten() for tensor in tensors.values()]).int()
    if device.type == "cuda":
        flat = flat.pin_memory().to(device, non_blocking=True)
    pieces = flat.split([tensor.numel() for tensor in tensors.values()])
    return {name: piece.view(tensor.shape) for (name, tensor), piece in zip(tensors.items(), pieces, strict=True)}


@functools.cache
def device_facts(device: torch.device) -> tuple[tuple[int, int], int]:
    """Compute capability and number of multiprocessors; in the interpreter, which has none to fill, 0."""
    if device.type != "cuda":
        return (9, 0), 0
    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.minor), properties.multi_processor_count
