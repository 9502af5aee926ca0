# mypy: ignore-errors
"""Paged attention over ragged queries: prompts, parts of prompts and decode rows in one launch.

A program takes a tile of query rows of one sequence and one KV head, and walks over tiles of keys and values with an
online softmax (Dao et al., 2022, "FlashAttention"). The heads of a group lie in the rows of one tile (Shazeer, 2019;
as in FlashInfer and vLLM), so their keys are read once. With splits, several programs walk over parts of the same keys
and `merge` joins them (FlashDecoding). `SHARED`: the rows of neighbouring sequences over blocks that they all have,
every key seen by every row (cascade attention).

Logarithms are of base 2: exp2 is the instruction that the hardware has, and the factor goes into the scale.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The interpreter multiplies bfloat16 matrices as if they were integers.
WIDEN_BFLOAT16 = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def _walk(
    acc,
    total,
    largest,
    q,
    cache,  # at the keys of this KV head in block 0
    blocks,  # this sequence's row of the block table
    begin,  # the position where tile 0 starts
    end,  # no key from here on
    first,
    last,  # tiles first:last
    last_key,  # int32 [BLOCK_M]: the last position that a row sees
    window,
    scale,
    cap,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,  # some row may not see some key; False: every row sees all of the tiles
):
    dim = tl.arange(0, DIM_PAD)[None, :]
    for tile in range(first, last):
        position = begin + tile * BLOCK_N + tl.arange(0, BLOCK_N)
        if MASKED:
            inside = position < end
            block = tl.load(blocks + position // BLOCK_SIZE, mask=inside, other=0)
        else:
            block = tl.load(blocks + position // BLOCK_SIZE)
        at = block.to(tl.int64) * (2 * NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM) + (position % BLOCK_SIZE) * HEAD_DIM
        keys = cache + at[:, None] + dim
        values = keys + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
        if MASKED and HEAD_DIM == DIM_PAD:
            k = tl.load(keys, mask=inside[:, None], other=0.0)
            v = tl.load(values, mask=inside[:, None], other=0.0)
        elif MASKED:
            k = tl.load(keys, mask=inside[:, None] & (dim < HEAD_DIM), other=0.0)
            v = tl.load(values, mask=inside[:, None] & (dim < HEAD_DIM), other=0.0)
        elif HEAD_DIM == DIM_PAD:
            k = tl.load(keys)
            v = tl.load(values)
        else:
            k = tl.load(keys, mask=dim < HEAD_DIM, other=0.0)
            v = tl.load(values, mask=dim < HEAD_DIM, other=0.0)

        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        factor = scale
        if HAS_SOFTCAP:
            scores = 1.0 - 2.0 / (1.0 + tl.exp2(scores * scale))  # tanh; the factor 2 log2(e) is in the scale
            factor = cap
        if MASKED:
            seen = position[None, :] <= last_key[:, None]
            if HAS_WINDOW:
                seen = seen & (position[None, :] > last_key[:, None] - window)
            scores = tl.where(seen, scores, -float("inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1) * factor)
        subtracted = new_largest
        if MASKED:  # a row that has seen no key yet: -inf - -inf is not a number
            subtracted = tl.where(new_largest == -float("inf"), 0.0, new_largest)
        weights = tl.exp2(scores * factor - subtracted[:, None])
        decay = tl.exp2(largest - subtracted)
        total = total * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * decay[:, None], input_precision="ieee")
        largest = new_largest
    return acc, total, largest


@triton.jit(
    do_not_specialize=["stride_table", "num_tokens", "first_part", "window"],
    do_not_specialize_on_alignment=[
        "block_table",
        "table_rows",
        "query_starts",
        "kv_lens",
        "begins",
        "tiles",
        "contexts",
    ],
)
def attention_kernel(
    q,  # [num_tokens, NUM_KV_HEADS * GROUP, HEAD_DIM], each token contiguous
    cache,  # [num_blocks, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM]
    out,  # like q, contiguous; with PARTIAL float32 [parts, num_tokens, NUM_KV_HEADS * GROUP, HEAD_DIM]
    lse,  # with PARTIAL float32 [parts, num_tokens, NUM_KV_HEADS * GROUP], else None
    block_table,  # int [rows, blocks]
    table_rows,  # int32 [num_seqs] or None: sequence i has row i
    query_starts,  # int32 [num_seqs + 1]
    kv_lens,  # int32 [num_seqs]
    begins,  # int32 [num_seqs] or None: the first position that is not read with a context
    tiles,  # int32 [num_tiles, 2] or None: sequence (or context) and first row in it; None: sequence i, one row
    contexts,  # with SHARED int32 [num_contexts, 6], else None: first sequence, rows and keys from and to, level
    sinks,  # [NUM_KV_HEADS * GROUP] or None; not with PARTIAL
    stride_q,
    stride_table,
    num_tokens,
    first_part,
    window,
    scale,
    cap,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,  # the grid's second axis cuts the keys; not how often: a kernel is compiled for every constant
    MIN_SPLIT_TILES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PARTIAL: tl.constexpr,
    SHARED: tl.constexpr,
    FREE_OF_MASKS: tl.constexpr,  # tiles that all rows see entirely go through a loop without masks
):
    item = tl.program_id(0) // NUM_KV_HEADS
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    split = tl.program_id(1)
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP  # tokens per tile

    # Which rows, and the positions begin:end that they read.
    first_row = 0
    if tiles is not None:
        first_row = tl.load(tiles + 2 * item + 1)
        item = tl.load(tiles + 2 * item)
    row = first_row + tl.arange(0, BLOCK_M) // GROUP
    part = first_part + split
    if SHARED:
        context = contexts + item * 6
        seq = tl.load(context)
        start = tl.load(context + 1)
        num_rows = tl.load(context + 2) - start
        begin = tl.load(context + 3)
        end = tl.load(context + 4)
        part += tl.load(context + 5) * tl.num_programs(1)
        last_key = row * 0 + (end - 1)
    else:
        seq = item
        kv_len = tl.load(kv_lens + seq)
        if tiles is None:
            start = seq
            num_rows = 1
        else:
            start = tl.load(query_starts + seq)
            num_rows = tl.load(query_starts + seq + 1) - start
        before = kv_len - num_rows  # the position of the sequence's first row
        end = before + tl.minimum(first_row + BLOCK_Q, num_rows)
        last_key = before + row
        begin = 0
        if begins is not None:
            begin = tl.load(begins + seq)
        if HAS_WINDOW:  # in whole tiles, so that a tile's place does not depend on the rows beside it
            begin = tl.maximum(before + first_row - window + 1, 0) // BLOCK_N * BLOCK_N

    num_tiles = (end - begin + BLOCK_N - 1) // BLOCK_N
    first = 0
    last = num_tiles
    if SPLIT:
        num_splits = tl.num_programs(1)
        per_split = tl.maximum((num_tiles + num_splits - 1) // num_splits, MIN_SPLIT_TILES)
        first = split * per_split
        last = tl.minimum(first + per_split, num_tiles)

    head = kv_head * GROUP + tl.arange(0, BLOCK_M) % GROUP
    valid = (tl.arange(0, BLOCK_M) < BLOCK_Q * GROUP) & (row < num_rows)
    token = (start + row).to(tl.int64)
    result = (part.to(tl.int64) * num_tokens + token) * (NUM_KV_HEADS * GROUP) + head
    if SPLIT and first >= last:
        tl.store(lse + result, tl.full([BLOCK_M], -float("inf"), tl.float32), mask=valid)
        return

    dim = tl.arange(0, DIM_PAD)[None, :]
    inside = valid[:, None] & (dim < HEAD_DIM)
    queries = tl.load(q + (token * stride_q + head * HEAD_DIM)[:, None] + dim, mask=inside, other=0.0)
    if WIDEN_BFLOAT16 and queries.dtype == tl.bfloat16:
        queries = queries.to(tl.float32)
    table_row = seq
    if table_rows is not None:
        table_row = tl.load(table_rows + seq)
    blocks = block_table + table_row.to(tl.int64) * stride_table
    own = cache + kv_head * (BLOCK_SIZE * HEAD_DIM)
    acc = tl.zeros([BLOCK_M, DIM_PAD], dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    largest = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)
    if FREE_OF_MASKS and not HAS_WINDOW:
        seen_by_all = end if SHARED else before + first_row + 1
        masked_from = tl.minimum(tl.maximum((seen_by_all - begin) // BLOCK_N, first), last)
        acc, total, largest = _walk(
            acc, total, largest, queries, own, blocks, begin, end, first, masked_from, last_key, window, scale, cap,
            NUM_KV_HEADS, HEAD_DIM, DIM_PAD, BLOCK_SIZE, BLOCK_N, HAS_WINDOW, HAS_SOFTCAP, MASKED=False,
        )  # fmt: skip
        first = masked_from
    acc, total, largest = _walk(
        acc, total, largest, queries, own, blocks, begin, end, first, last, last_key, window, scale, cap,
        NUM_KV_HEADS, HEAD_DIM, DIM_PAD, BLOCK_SIZE, BLOCK_N, HAS_WINDOW, HAS_SOFTCAP, MASKED=True,
    )  # fmt: skip

    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        with_sink = tl.maximum(largest, sink)
        total = total * tl.exp2(largest - with_sink) + tl.exp2(sink - with_sink)
        acc = acc * tl.exp2(largest - with_sink)[:, None]
    total = tl.where(total == 0.0, 1.0, total)  # a row that saw no key: lse -inf
    if PARTIAL:
        tl.store(lse + result, largest + tl.log2(total), mask=valid)
    acc = acc / total[:, None]
    tl.store(out + result[:, None] * HEAD_DIM + dim, acc.to(out.dtype.element_ty), mask=inside)
