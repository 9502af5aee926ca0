"""The Triton kernels of the sampler against its form in plain PyTorch: on a GPU, or else in Triton's interpreter."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from batchjob.core import Sequence
from batchjob.engine.sampling import edits
from batchjob.engine.sampling.philox import exponential, philox4x32
from batchjob.engine.sampling.sampler import Sampler
from batchjob.engine.sampling.slot_params import Need
from batchjob.records import Request
from batchjob.sampling import SamplingParams
from batchjob_kernels.sampling import settings_table as layout

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from batchjob_kernels.sampling import triton as sampling_ops  # noqa: E402
from batchjob_kernels.triton_kernels import sample_draw  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EOS = (2, 5)


def randn(*shape: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(DEVICE)


def sequence(slot: int, *, stream: int = 0, output: tuple[int, ...] = (), max_len: int = 99, **params: Any) -> Sequence:
    seq = Sequence(Request(0, 0, [1, 0, 1], SamplingParams(**params), stream, output), max_len)
    seq.slot = slot
    return seq


class Both:
    """The two forms with the same sequences admitted."""

    def __init__(self, vocab_size: int, seqs: list[Sequence]) -> None:
        self.portable, self.kernels = (
            Sampler(vocab_size, EOS, max_num_seqs=64, device=DEVICE, use_triton=use_triton)
            for use_triton in (False, True)
        )
        for sampler in (self.portable, self.kernels):
            sampler.prepare(seqs, [seq.slot for seq in seqs])
        self.slots = torch.tensor([seq.slot for seq in seqs], dtype=torch.int32, device=DEVICE)
        self.num_output = torch.tensor([seq.num_output_tokens for seq in seqs], dtype=torch.int32, device=DEVICE)

    def each(self, call: Callable[[Sampler], Tensor]) -> tuple[list[Any], list[Any]]:
        return call(self.kernels).tolist(), call(self.portable).tolist()

    def sample(self, logits: Tensor) -> tuple[list[int], list[int]]:
        return self.each(lambda sampler: sampler.sample(logits, self.slots, self.num_output))

    @property
    def settings(self) -> Tensor:
        return self.portable._tables.settings


# -- random numbers


@triton.jit
def _words_kernel(keys, positions, levels, words, draws, NUM: tl.constexpr):
    row = tl.program_id(0)
    index = tl.arange(0, NUM)
    word = sample_draw.philox_word(
        tl.load(keys + 2 * row), tl.load(keys + 2 * row + 1), index, tl.load(positions + row), tl.load(levels + row)
    )
    tl.store(words + row * NUM + index, word.to(tl.int64))
    tl.store(draws + row * NUM + index, sample_draw.exponential(word))


def test_random_words_are_those_of_the_host(check_close: Callable[..., None]) -> None:
    num_rows, num = 6, 512
    rng = random.Random(0)
    streams = [0, 2**64 - 1, *(rng.getrandbits(64) for _ in range(num_rows - 2))]
    positions = [0, 2**31 - 1, *(rng.randrange(100_000) for _ in range(num_rows - 2))]
    low, high = torch.tensor([s & 0xFFFFFFFF for s in streams]), torch.tensor([s >> 32 for s in streams])
    position, level = torch.tensor(positions), torch.tensor([0, 1] * (num_rows // 2))
    counter = torch.arange(num // 4)[None, :]
    zeros = torch.zeros(1, 1, dtype=torch.int64)
    expected = philox4x32((counter, position[:, None], level[:, None], zeros), (low[:, None], high[:, None])).flatten(1)
    words = torch.empty(num_rows, num, dtype=torch.int64, device=DEVICE)
    draws = torch.empty(num_rows, num, dtype=torch.float64, device=DEVICE)
    _words_kernel[(num_rows,)](
        torch.stack([low, high], dim=1).int().to(DEVICE),
        position.int().to(DEVICE),
        level.int().to(DEVICE),
        words,
        draws,
        NUM=num,
    )
    assert torch.equal(words.cpu(), expected)
    ratio = draws.cpu() / exponential(expected)
    check_close("exponential draws", ratio, torch.ones_like(ratio), 1e-14)


# -- weights and bounds


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_group_weights(dtype: torch.dtype, check_close: Callable[..., None]) -> None:
    vocab_size = 2_500  # ends inside a group
    seqs = [sequence(slot, temperature=t) for slot, t in enumerate([0.4, 1.0, 1.9])]
    both = Both(vocab_size, seqs)
    logits = randn(3, vocab_size).to(dtype)
    logits[:, 300:600] = -math.inf  # a group without any token
    maxima, sums = sampling_ops.group_weights(logits, both.settings, both.slots, random=True)
    padded = torch.full((3, 2_560), -math.inf, dtype=torch.float64, device=DEVICE)
    padded[:, :vocab_size] = logits
    groups = padded.view(3, 10, layout.GROUP)
    assert torch.equal(maxima.double(), groups.amax(dim=2))
    around = groups.amax(dim=2, keepdim=True).clamp(min=-1e9)
    temperature = torch.tensor([0.4, 1.0, 1.9], device=DEVICE).double()[:, None, None]
    expected = ((groups - around) / temperature).exp().sum(dim=2)
    assert torch.equal(sums == 0, expected == 0)
    ratio = torch.where(expected == 0, 1.0, sums / expected)
    check_close(f"group weights, {dtype}", ratio, torch.ones_like(ratio), 2e-6)


def test_group_weights_are_the_same_bits_with_limits_that_keep_everything() -> None:
    # A row without filters must not change with what runs beside it.
    seqs = [sequence(slot, temperature=0.7 + 0.3 * slot) for slot in range(3)]
    both = Both(1_500, seqs)
    logits = randn(3, 1_500).bfloat16()
    maxima, sums = sampling_ops.group_weights(logits, both.settings, both.slots, random=True)
    limits = sampling_ops.weight_bounds(logits, both.settings, both.slots, maxima)
    assert limits[0].tolist() == logits.float().amax(dim=1).tolist()
    assert limits[1].tolist() == [0.0] * 3
    again = sampling_ops.group_weights(logits, both.settings, both.slots, random=True, limits=limits)
    assert torch.equal(again[0], maxima)
    assert torch.equal(again[1], sums)


def kept(logits: Tensor, params: SamplingParams) -> set[int]:
    """The tokens that the filters of a row leave, by their definition."""
    weights = ((logits.double() - logits.max()) / params.temperature).exp().tolist()
    order = sorted(weights, reverse=True)
    if params.top_k:
        weights = [w if w >= order[min(params.top_k, len(order)) - 1] else 0.0 for w in weights]
    if params.top_p < 1.0:
        mass, bound = 0.0, 0.0
        for bound in sorted(weights, reverse=True):
            mass += bound
            if mass >= params.top_p * sum(weights):
                break
        weights = [w if w >= bound else 0.0 for w in weights]
    return {token for token, w in enumerate(weights) if w > 0.0 and w >= params.min_p}


FILTERS: list[dict[str, Any]] = [
    {"top_k": 7},
    {"top_k": 900},
    {"top_p": 0.97},
    {"min_p": 0.2},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.02},
]


def test_bounds_keep_what_the_filters_keep() -> None:
    vocab_size = 1_300  # more than one tile
    seqs = [sequence(slot, temperature=0.9, **filters) for slot, filters in enumerate(FILTERS)]
    both = Both(vocab_size, seqs)
    logits = randn(len(seqs), vocab_size, scale=2.0).bfloat16()  # with many ties
    maxima, _ = sampling_ops.group_weights(logits, both.settings, both.slots, random=False)
    best, bounds = sampling_ops.weight_bounds(logits, both.settings, both.slots, maxima)
    for row, seq in enumerate(seqs):
        weights = ((logits[row].float() - best[row]) / 0.9).exp()
        # The kernel's exponential may differ from PyTorch's in the last bits; weights that tie do so in either.
        got = set((weights >= bounds[row] * (1 - 1e-6)).nonzero().flatten().tolist())
        assert got == kept(logits[row], seq.request.params), FILTERS[row]


# -- tokens


KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8},
    {"temperature": 1e-30},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 0.7, "min_p": 0.05, "repetition_penalty": 1.3},
    {"presence_penalty": 1.0, "frequency_penalty": 0.2},
    {"temperature": 0.9, "min_tokens": 9, "logit_bias": ((0, 4.0), (2, -1.5))},
    {"min_tokens": 9, "stop_token_ids": (0,)},
]


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(3, torch.float32), (1024, torch.bfloat16), (1301, torch.float16)], ids=str
)
def test_tokens_are_those_of_the_portable_form(vocab_size: int, dtype: torch.dtype) -> None:
    seqs = [sequence(7 * slot, stream=slot << 40, output=(0, 2) * slot, **kind) for slot, kind in enumerate(KINDS)]
    both = Both(vocab_size, seqs)
    assert both.kernels.needs | Need.TOP_K == Need(255)  # of 3 tokens top_k leaves all
    got, expected = both.sample(randn(len(seqs), vocab_size, scale=2.0).to(dtype))
    assert got == expected


def test_unfiltered_rows_and_other_forms_of_the_arguments() -> None:
    seqs = [sequence(slot, stream=slot, temperature=1.5 * (slot % 4)) for slot in range(8)]
    both = Both(515, seqs)
    assert both.kernels.needs == Need.GREEDY | Need.RANDOM
    both.slots, both.num_output = both.slots.long(), both.num_output.long()
    logits = randn(8, 1030, scale=1.0)
    got, expected = both.sample(logits[:, :515])  # rows that are not next to each other
    assert got == expected
    assert len(set(got)) > 5
    transposed = logits[:, :515].T.contiguous().T
    assert both.sample(transposed)[0] == got
    both.kernels.needs |= Need.FILTERED
    assert both.sample(logits[:, :515])[0] == got


@pytest.mark.parametrize("random_rows", [False, True])
def test_greedy_takes_the_first_of_equal_logits(random_rows: bool) -> None:
    vocab_size = 2_500
    both = Both(vocab_size, [sequence(slot) for slot in range(6)])
    both.kernels.needs |= Need.RANDOM if random_rows else 0
    logits = randn(6, vocab_size).round().bfloat16()
    logits[0], logits[1, [300, 2400]] = 0.0, 50.0
    got, _ = both.sample(logits)
    assert got == [row.index(max(row)) for row in logits.float().tolist()]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}], ids=str)
def test_logits_that_are_no_numbers_give_no_token(params: dict[str, Any]) -> None:
    seqs = [sequence(slot, stream=slot, **params) for slot in range(6)]
    both = Both(600, seqs)
    logits = randn(6, 600)
    good = both.portable.sample(logits, both.slots, both.num_output).tolist()
    logits[1, 17], logits[2, 599], logits[3], logits[4] = math.nan, math.inf, -math.inf, math.nan
    logits[5, :500] = -math.inf  # masked, but not all
    got, expected = both.sample(logits)
    assert got == expected
    assert got[:5] == [good[0], -1, -1, -1, -1]
    assert got[5] >= 500


def test_penalties_and_counts_over_steps() -> None:
    kinds: list[dict[str, Any]] = [
        {"repetition_penalty": 1.4},
        {"presence_penalty": 0.8, "temperature": 0.5},
        {"repetition_penalty": 0.7, "presence_penalty": -0.5, "frequency_penalty": 0.6},
        {},
    ]
    both = Both(40, [sequence(slot, output=(5, 5, 8), **kind) for slot, kind in enumerate(kinds)])
    for step in range(4):
        got, expected = both.sample(randn(4, 40, seed=step))
        assert got == expected
        both.num_output += 1
    counts = both.kernels._tables.counts
    assert counts is not None
    assert torch.equal(counts, both.portable._tables.counts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_penalised_logits(dtype: torch.dtype, check_close: Callable[..., None]) -> None:
    vocab_size = 1_100  # more than one tile
    kinds: list[dict[str, Any]] = [
        {"repetition_penalty": 1.4},
        {"presence_penalty": 3.0, "frequency_penalty": 0.5},  # prompt tokens 0 and 1 are not in the output
        {},
    ]
    both = Both(vocab_size, [sequence(slot + 3, output=(5, 5, 1099), **kind) for slot, kind in enumerate(kinds)])
    counts = both.portable._tables.counts
    assert counts is not None
    logits = randn(3, 2 * vocab_size).to(dtype)[:, :vocab_size]
    expected = logits.to(torch.float32, copy=True)
    edits.penalise(expected, both.settings[both.slots], counts[both.slots])
    got = sampling_ops.penalise(logits, both.settings, counts, both.slots)
    check_close("penalised logits", got, expected, 1e-6)
    assert (got != logits).sum(dim=1).tolist() == [4, 2, 0]


def test_a_step_of_no_rows() -> None:
    both = Both(300, [sequence(0, temperature=1.0, top_k=3, presence_penalty=1.0)])
    both.slots, both.num_output = both.slots[:0], both.num_output[:0]
    assert both.sample(randn(0, 300)) == ([], [])
    assert both.each(lambda s: s.ended(both.slots.long(), both.slots, both.num_output)) == ([], [])


# -- the stop check


@pytest.mark.parametrize("num_rows", [5, 300])
def test_the_stop_check(num_rows: int) -> None:
    rng = random.Random(num_rows)
    seqs = [
        sequence(
            slot,
            max_len=rng.choice([5, 7, 2**40]),
            min_tokens=rng.choice([0, 0, 1, 3, 2**40]),
            ignore_eos=rng.random() < 0.5,
            stop_token_ids=tuple(rng.randrange(8) for _ in range(rng.choice([0, 0, 1, 5]))),
        )
        for slot in range(65)
    ]
    both = Both(100, seqs[:64])
    tokens, slots, num_output = (
        torch.tensor([rng.randint(*limits) for _ in range(num_rows)], device=DEVICE)
        for limits in ((-1, 7), (0, 64), (0, 6))
    )
    got, expected = both.each(lambda sampler: sampler.ended(tokens, slots, num_output))
    assert got == expected
    assert len(set(got)) == 2


# -- on a GPU only


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
def test_graphs_and_no_waiting() -> None:
    seqs = [sequence(slot, stream=slot, **kind) for slot, kind in enumerate(KINDS)]
    both = Both(32_000, seqs)
    both.sample(randn(len(seqs), 32_000))  # compiles
    both = Both(32_000, seqs)
    logits = randn(len(seqs), 32_000).bfloat16()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        both.kernels.prepare(seqs, [seq.slot for seq in seqs])
        both.kernels.sample(logits, both.slots, both.num_output)
        both.kernels.prepare(seqs, [seq.slot for seq in seqs])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tokens = both.kernels.sample(logits, both.slots, both.num_output)
            both.kernels.ended(tokens, both.slots, both.num_output)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for seed in range(3):
        logits.copy_(randn(len(seqs), 32_000, seed=seed))
        both.num_output.fill_(seed)
        graph.replay()
        assert tokens.tolist() == both.portable.sample(logits, both.slots, both.num_output).tolist()
