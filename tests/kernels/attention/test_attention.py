"""Every backend against the reference, over ragged steps: decode, prompt parts, shared blocks, windows, caps, sinks."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from batchjob_kernels import AttnMeta, Context, Requirements
from batchjob_kernels.attention import gather, gather_pieces, reference, triton
from batchjob_kernels.attention.select import BACKENDS as NAMES
from batchjob_kernels.attention.select import backend as backend_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # for the backends that run on either
NUM_KV_HEADS, GROUP, HEAD_DIM = 2, 3, 16
NEED = Requirements(
    device=torch.device(DEVICE),
    capability=torch.cuda.get_device_capability() if DEVICE == "cuda" else None,
    dtype=torch.float32,
    kv_dtype=torch.float32,
    head_dims=frozenset({HEAD_DIM}),
    group_sizes=frozenset({GROUP}),
    block_size=4,
    windows=True,
    softcap=True,
    sinks=True,
)
# Every backend that computes all of this in float32 here.
BACKENDS = [backend_of(name) for name in NAMES if name != "reference" and backend_of(name).refusal(NEED) is None]
every_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda module: module.__name__.split(".")[-1])


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@dataclass
class Step:
    q: Tensor
    kv: Tensor
    cache: Tensor
    meta: AttnMeta


def on_its_device(step: Step, backend: ModuleType) -> Step:
    """A copy where the backend runs, its memo empty."""
    device = DEVICE if backend is triton else "cpu"
    table, slot_mapping = step.meta.block_table.to(device), step.meta.slot_mapping.to(device)
    meta = replace(step.meta, block_table=table, slot_mapping=slot_mapping, memo={})
    return Step(step.q.to(device), step.kv.to(device), step.cache.to(device, copy=True), meta)


def make_step(
    query_lens: list[int],
    num_before: list[int],
    *,
    block_size: int = 4,
    contexts: tuple[Context, ...] = (),
    seed: int = 0,
) -> Step:
    """A step over shuffled blocks; the sequences of a context hold the same ones."""
    generator = torch.Generator().manual_seed(seed)
    kv_lens = [new + before for new, before in zip(query_lens, num_before, strict=True)]
    width = max(-(-length // block_size) for length in kv_lens)
    num_blocks = width * len(kv_lens)
    table = torch.randperm(num_blocks, generator=generator).view(-1, width)
    for context in contexts:
        shared = table[context.first_seq, context.first_block : context.last_block].clone()
        table[context.first_seq : context.last_seq, context.first_block : context.last_block] = shared
    slot_mapping = [
        int(table[row, position // block_size]) * block_size + position % block_size
        for row, (new, length) in enumerate(zip(query_lens, kv_lens, strict=True))
        for position in range(length - new, length)
    ]
    num_tokens = sum(query_lens)
    step = Step(
        torch.randn(num_tokens, NUM_KV_HEADS * GROUP, HEAD_DIM, generator=generator),
        torch.randn(num_tokens, 2, NUM_KV_HEADS, HEAD_DIM, generator=generator),
        torch.randn(num_blocks + 1, 2, NUM_KV_HEADS, block_size, HEAD_DIM, generator=generator),
        AttnMeta(query_lens, kv_lens, table, torch.tensor(slot_mapping), block_size, list(contexts)),
    )
    reference.write_kv(step.kv, step.cache, step.meta)
    return step


STEPS = {
    "decode": make_step([1] * 6, [0, 3, 4, 17, 18, 40]),
    "decode of one length": make_step([1] * 5, [11] * 5),
    "whole prompts": make_step([5, 1, 12], [0, 0, 0]),
    "later parts of prompts": make_step([5, 7, 3], [4, 9, 30]),
    "mixed": make_step([1, 1, 9, 1, 4, 2], [20, 7, 0, 31, 5, 16]),
    "one token of its own block": make_step([1], [8]),
    "shared blocks": make_step([1, 1, 1, 6], [15, 12, 24, 12], contexts=(Context(0, 4, 0, 3),)),
    "shared blocks of some": make_step([1, 1, 3, 1, 8], [9, 16, 17, 12, 0], contexts=(Context(1, 4, 0, 2),)),
    "shared blocks within shared blocks": make_step(
        [1, 1, 4, 1, 5], [12, 20, 21, 30, 14], contexts=(Context(0, 5, 0, 2), Context(1, 4, 2, 5))
    ),
}


def attend(backend: ModuleType, step: Step, *, sinks: Tensor | None = None, **more: Any) -> Tensor:
    step = on_its_device(step, backend)
    sinks = None if sinks is None else sinks.to(step.q.device)
    return backend.paged_attention(step.q, step.kv, step.cache, step.meta, sinks=sinks, **more).cpu()


@every_backend
@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("window", [None, 1, 6, 1000])
@pytest.mark.parametrize("name", STEPS)
def test_equals_the_reference(
    name: str, window: int | None, softcap: float | None, with_sinks: bool, backend: ModuleType
) -> None:
    is_full, is_plain = with_sinks and softcap is not None, not with_sinks and softcap is None
    if backend is triton and DEVICE == "cpu" and not (is_full or (is_plain and window in (None, 6))):
        pytest.skip("the interpreter is slow: sinks and soft-cap together, or neither")
    sinks = torch.linspace(-2, 2, NUM_KV_HEADS * GROUP) if with_sinks else None
    expected, actual = (
        attend(module, STEPS[name], scale=0.3, window=window, softcap=softcap, sinks=sinks)
        for module in (reference, backend)
    )
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@every_backend
def test_random_steps_equal_the_reference(backend: ModuleType) -> None:
    for seed in range(5 if backend is triton and DEVICE == "cpu" else 30):  # the interpreter is slow
        rng = random.Random(seed)
        query_lens = [rng.choice([1, 1, 1, rng.randint(2, 20)]) for _ in range(rng.randint(1, 12))]
        num_before = [rng.randint(0, 60) for _ in query_lens]
        step = make_step(query_lens, num_before, block_size=rng.choice([1, 4, 16]), seed=seed)
        window = rng.choice([None, rng.randint(1, 40)])
        expected, actual = (attend(module, step, scale=0.25, window=window) for module in (reference, backend))
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_the_reference_is_softmax_attention() -> None:
    step = make_step([6], [0])
    keys, values = step.kv.repeat_interleave(GROUP, dim=2).unbind(1)
    expected = torch.nn.functional.scaled_dot_product_attention(
        step.q.transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1), is_causal=True, scale=0.3
    )
    actual = reference.paged_attention(step.q, step.kv, step.cache, step.meta, scale=0.3)
    torch.testing.assert_close(actual, expected.transpose(0, 1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", [reference, *BACKENDS], ids=lambda module: module.__name__.split(".")[-1])
def test_numbers_that_are_not_finite_do_not_reach_the_next_owner_of_a_block(backend: ModuleType) -> None:
    step = on_its_device(make_step([1, 1], [5, 9]), backend)
    broken = torch.full_like(step.kv, torch.nan)
    broken[1] = torch.inf
    backend.write_kv(broken, step.cache, step.meta)
    assert bool(torch.isfinite(step.cache).all())
    # The same blocks, filled again up to a token earlier: the broken ones are masked.
    shorter = replace(step.meta, kv_lens=[5, 9], memo={})
    out = backend.paged_attention(step.q, step.kv, step.cache, shorter, scale=0.3)
    assert bool(torch.isfinite(out).all())


@every_backend
def test_writes_the_slots_and_nothing_else(backend: ModuleType) -> None:
    step = on_its_device(make_step([3, 1, 2], [2, 9, 4]), backend)
    cache = torch.zeros_like(step.cache)
    backend.write_kv(step.kv, cache, step.meta)
    flat = cache.permute(0, 3, 1, 2, 4).flatten(0, 1)  # a copy, by slot
    torch.testing.assert_close(flat[step.meta.slot_mapping], step.kv)
    flat[step.meta.slot_mapping] = 0
    assert not bool(flat.any())


def cut(step: Step) -> gather_pieces.Pieces:
    return gather_pieces.cut(step.meta, window=None, num_kv_heads=NUM_KV_HEADS, dtype=torch.float32)


def test_decode_rows_of_one_length_are_read_together_and_others_apart() -> None:
    near = make_step([1] * 8, [30, 30, 31, 31, 32, 33, 34, 35], block_size=16)
    assert [piece.batch for piece in cut(near).own] == [8]
    far = make_step([1] * 8, [3] * 4 + [1000] * 4, block_size=16)
    assert [piece.batch for piece in cut(far).own] == [4, 4]


def test_shared_blocks_are_read_once() -> None:
    step = make_step([1] * 10, [50] * 10, block_size=16, contexts=(Context(0, 10, 0, 3),))
    assert [piece.kv_len for piece in cut(step).shared] == [48]
    assert [piece.kv_len for piece in cut(step).own] == [16]


def test_many_rows_over_long_shared_blocks_equal_the_reference() -> None:
    query_lens = [1] * 20 + [40, 7]
    context = Context(0, 22, 0, 20)
    step = make_step(query_lens, [320 + 3 * row for row in range(22)], block_size=16, contexts=(context,))
    expected, actual = (
        module.paged_attention(step.q, step.kv, step.cache, step.meta, scale=0.3) for module in (reference, gather)
    )
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
