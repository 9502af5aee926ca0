"""The invariant backend: right, and the same bits however a sequence is cut into steps and whatever shares them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from batchjob_kernels import AttnMeta, DeviceLens, Requirements
from batchjob_kernels.attention import gather, invariant, reference
from batchjob_kernels.attention.invariant_products import all_threads, bmm, single_thread

NUM_KV_HEADS, GROUP, HEAD_DIM = 2, 3, 16
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 6},
    "wide window": {"window": 131},
    "soft-cap": {"softcap": 3.0},
    "sinks": {"sinks": torch.linspace(-2, 2, NUM_KV_HEADS * GROUP)},
    "all": {"window": 9, "softcap": 2.0, "sinks": torch.linspace(-1, 3, NUM_KV_HEADS * GROUP)},
}
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@dataclass
class Sequence:
    q: Tensor  # [length, heads, head_dim]
    kv: Tensor  # [length, 2, kv_heads, head_dim]

    @classmethod
    def random(cls, length: int, seed: int, dtype: torch.dtype = torch.float32) -> Sequence:
        generator = torch.Generator().manual_seed(seed)
        return cls(
            torch.randn(length, NUM_KV_HEADS * GROUP, HEAD_DIM, generator=generator).to(dtype),
            torch.randn(length, 2, NUM_KV_HEADS, HEAD_DIM, generator=generator).to(dtype),
        )


class Paged:
    """A cache that starts full of noise, and the blocks of some sequences in it; runs steps of them."""

    def __init__(self, seqs: list[Sequence], *, block_size: int = 4, seed: int = 0, cache_dtype: Any = None) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.seqs, self.block_size = seqs, block_size
        width = max(-(-len(seq.q) // block_size) for seq in seqs)
        num_blocks = width * len(seqs)
        self.table = torch.randperm(num_blocks, generator=generator).view(-1, width)
        self.cache = torch.randn(num_blocks + 1, 2, NUM_KV_HEADS, block_size, HEAD_DIM, generator=generator)
        self.cache = self.cache.to(cache_dtype or seqs[0].kv.dtype)

    def meta(self, parts: list[tuple[int, int, int]]) -> AttnMeta:
        slot_mapping = [
            int(self.table[row, position // self.block_size]) * self.block_size + position % self.block_size
            for row, start, stop in parts
            for position in range(start, stop)
        ]
        return AttnMeta(
            query_lens=[stop - start for _, start, stop in parts],
            kv_lens=[stop for _, _, stop in parts],
            block_table=self.table[[row for row, _, _ in parts]],
            slot_mapping=torch.tensor(slot_mapping),
            block_size=self.block_size,
        )

    def step(self, parts: list[tuple[int, int, int]], backend: Any = invariant, **variant: Any) -> list[Tensor]:
        """(sequence, start, stop) of each slice -> its output."""
        meta = self.meta(parts)
        q = torch.cat([self.seqs[row].q[start:stop] for row, start, stop in parts])
        kv = torch.cat([self.seqs[row].kv[start:stop] for row, start, stop in parts])
        backend.write_kv(kv, self.cache, meta)
        out = backend.paged_attention(q, kv, self.cache, meta, scale=0.3, **variant)
        return list(out.split(meta.query_lens))


def same(actual: Tensor, expected: Tensor) -> bool:
    """Bit by bit: tells 0 from -0."""
    kind = torch.int32 if actual.dtype == torch.float32 else torch.int16
    return bool(torch.equal(actual.view(kind), expected.view(kind)))


STEPS = {
    "decode": [(0, 1), (3, 4), (4, 5), (17, 18), (18, 19), (140, 141), (127, 128), (128, 129)],
    "whole prompts": [(0, 5), (0, 1), (0, 12), (0, 135)],
    "later parts": [(4, 9), (9, 16), (30, 33), (120, 140)],
    "mixed": [(20, 21), (7, 8), (0, 9), (31, 32), (5, 9), (16, 18)],
    "one token": [(8, 9)],
}


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", STEPS)
def test_equals_the_reference(name: str, variant: str, block_size: int) -> None:
    seqs = [Sequence.random(stop, seed) for seed, (_, stop) in enumerate(STEPS[name])]
    parts = [(row, start, stop) for row, (start, stop) in enumerate(STEPS[name])]
    expected, actual = (
        torch.cat(Paged(seqs, block_size=block_size).step(parts, backend, **VARIANTS[variant]))
        for backend in (reference, invariant)
    )
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def runs(length: int, variant: dict[str, Any], dtype: torch.dtype, cuts: list[list[int]], **more: Any) -> list[Tensor]:
    """The output of one sequence alone, cut into steps at each of `cuts`, on other blocks each time."""
    seq = Sequence.random(length, 1, dtype)
    outs = []
    for seed, bounds in enumerate(cuts):
        paged = Paged([seq], seed=seed, **more)
        spans = zip([0, *bounds], [*bounds, length], strict=True)
        outs.append(torch.cat([paged.step([(0, start, stop)], **variant)[0] for start, stop in spans]))
    return outs


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_cut_of_a_prompt_and_decoding_it_give_the_bits_of_the_whole(variant: str, dtype: torch.dtype) -> None:
    length = 150  # more than a chunk
    near = [*range(1, 12), *range(122, 136), 149]
    cuts = [[], list(range(1, length)), *([cut] for cut in near), *([cut, cut + 1] for cut in near[:-1:7])]
    whole, *others = runs(length, VARIANTS[variant], dtype, cuts)
    assert all(same(out, whole) for out in others)


@pytest.mark.long
@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_cut_of_a_long_prompt(variant: str, dtype: torch.dtype, block_size: int) -> None:
    length = 300
    cuts = [[], list(range(1, length)), *([cut] for cut in range(1, length))]
    whole, *others = runs(length, VARIANTS[variant], dtype, cuts, block_size=block_size)
    assert all(same(out, whole) for out in others)


@pytest.mark.parametrize(
    ("variant", "dtype", "num_threads", "num_runs"),
    [
        *((variant, dtype, 1, 2) for variant in VARIANTS for dtype in DTYPES),
        ("all", torch.float32, 2, 1),
        *(pytest.param(v, dtype, 2, 20, marks=pytest.mark.long) for v in VARIANTS for dtype in DTYPES),
    ],
    ids=str,
)
def test_what_else_is_in_a_step_changes_no_bit(
    variant: str, dtype: torch.dtype, num_threads: int, num_runs: int
) -> None:
    torch.set_num_threads(num_threads)
    lengths = [40, 1, 133, 7, 64, 18, 30, 31, 32, 33]
    seqs = [Sequence.random(length, seed, dtype) for seed, length in enumerate(lengths)]
    alone_ = [Paged([seq]).step([(0, 0, len(seq.q))], **VARIANTS[variant])[0] for seq in seqs]
    rng = random.Random(variant)
    for seed in range(num_runs):
        paged = Paged(seqs, block_size=rng.choice([1, 4, 16]), seed=seed)
        done = [0] * len(seqs)
        outs: list[list[Tensor]] = [[] for _ in seqs]
        while pending := [row for row, length in enumerate(lengths) if done[row] < length]:
            rows = rng.sample(pending, rng.randint(1, len(pending)))
            parts = [(row, done[row], min(lengths[row], done[row] + rng.choice([1, 9, 50]))) for row in rows]
            for (row, _, stop), out in zip(parts, paged.step(parts, **VARIANTS[variant]), strict=True):
                outs[row].append(out)
                done[row] = stop
        assert all(same(torch.cat(out), expected) for out, expected in zip(outs, alone_, strict=True))


def test_other_backends_do_give_other_bits() -> None:
    """Otherwise the tests above would show nothing."""
    seq = Sequence.random(150, 1)
    whole = Paged([seq]).step([(0, 0, 150)], gather)[0]
    paged = Paged([seq])
    decoded = torch.cat([paged.step([(0, at, at + 1)], gather)[0] for at in range(150)])
    torch.testing.assert_close(decoded, whole, atol=1e-5, rtol=1e-5)
    assert not same(decoded, whole)


def test_the_sign_of_a_zero_does_not_follow_what_is_hidden() -> None:
    seq = Sequence.random(9, 1)
    seq.kv[:, 1] = 0.0
    outs = []
    for sign in (1.0, -1.0):
        paged = Paged([seq])
        paged.cache.fill_(sign)
        outs.append(paged.step([(0, 0, 9)])[0])
    assert same(*outs)
    assert not bool(outs[0].signbit().any())


def test_lengths_on_the_device_are_understood() -> None:
    seqs = [Sequence.random(20, 1), Sequence.random(30, 2)]
    paged = Paged(seqs)
    expected = torch.cat(paged.step([(1, 0, 30), (0, 0, 20)]))
    meta = paged.meta([(1, 0, 30), (0, 0, 20)])
    meta.block_table = paged.table.to(torch.int32)
    meta.device_lens = DeviceLens(*(torch.tensor(v, dtype=torch.int32) for v in ([0, 30, 50], [30, 20], [1, 0])))
    q = torch.cat((seqs[1].q, seqs[0].q))
    assert same(invariant.paged_attention(q, None, paged.cache, meta, scale=0.3), expected)


def test_numbers_that_are_not_finite_are_stored_as_zero() -> None:
    seq = Sequence.random(6, 1)
    seq.kv[2], seq.kv[3] = torch.nan, torch.inf
    paged = Paged([seq])
    meta = paged.meta([(0, 0, 6)])
    invariant.write_kv(seq.kv, paged.cache, meta)
    stored = paged.cache.permute(0, 3, 1, 2, 4).flatten(0, 1)[meta.slot_mapping]
    assert torch.equal(stored, torch.nan_to_num(seq.kv, posinf=0.0))


def test_a_broken_row_breaks_no_other() -> None:
    seqs = [Sequence.random(20, 1), Sequence.random(30, 2)]
    expected = Paged([seqs[0]]).step([(0, 0, 20)])[0]
    seqs[1].q[:], seqs[1].kv[:] = torch.nan, torch.nan
    out, broken = Paged(seqs).step([(0, 0, 20), (1, 0, 30)])
    assert same(out, expected)
    assert bool(broken.isnan().all())
    seqs[0].q[5] = torch.nan  # in a tile with others
    out = Paged([seqs[0]]).step([(0, 0, 20)])[0]
    others = torch.arange(20) != 5
    assert same(out[others], expected[others])


def test_an_fp8_cache_is_clamped_and_read_alike_in_every_cut() -> None:
    seq = Sequence.random(40, 1)
    seq.kv[3] *= 1000
    outs = []
    for bounds in ([40], list(range(1, 41)), [13, 40]):
        paged = Paged([seq], cache_dtype=torch.float8_e4m3fn)
        outs.append(torch.cat([paged.step([(0, a, b)])[0] for a, b in zip([0, *bounds], bounds, strict=False)]))
    rounded = Sequence(seq.q, seq.kv.clamp(-448, 448).to(torch.float8_e4m3fn).float())
    expected = Paged([rounded]).step([(0, 0, 40)], reference)[0]
    torch.testing.assert_close(outs[0], expected, atol=1e-4, rtol=1e-4)
    assert same(outs[0], outs[1])
    assert same(outs[0], outs[2])


def test_refuses_devices_that_it_does_not_know() -> None:
    def need(device: str) -> Requirements:
        dims = frozenset({64})
        return Requirements(torch.device(device), None, torch.float32, torch.float32, dims, dims, 16)

    assert invariant.refusal(need("cpu")) is None
    assert invariant.refusal(need("cuda")) is None
    assert "not on 'meta'" in str(invariant.refusal(need("meta")))


def test_threads_are_given_to_products_alone() -> None:
    torch.set_num_threads(2)
    with single_thread():
        assert torch.get_num_threads() == 1
        with all_threads():
            assert torch.get_num_threads() == 2
            with single_thread():
                assert torch.get_num_threads() == 1
                assert bmm(torch.ones(2, 3, 4), torch.ones(2, 4, 5)).shape == (2, 3, 5)
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    with pytest.raises(ValueError, match="planned"), single_thread(), all_threads():
        raise ValueError("planned")
    assert torch.get_num_threads() == 2
