"""The sampler against a plain-Python reference, and what a row's tokens may depend on.

Both of its ways in plain PyTorch run on the CPU: "in parts", a CPU's own, and "no waiting", that of a GPU without
Triton.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from batchjob.core import Sequence
from batchjob.engine.sampling import draw
from batchjob.engine.sampling.filters import _mass
from batchjob.engine.sampling.sampler import Sampler
from batchjob.engine.sampling.slot_params import Need
from batchjob.records import Request, stream_key
from batchjob.sampling import SamplingParams
from batchjob_kernels.sampling.settings_table import GROUP

EOS = (2, 5)
CPU = torch.device("cpu")
Sample = Callable[[Tensor, list[Sequence]], list[int]]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def sequence(
    stream: int = 0,
    *,
    slot: int = 0,
    prompt: tuple[int, ...] = (1,),
    output: tuple[int, ...] = (),
    max_len: int = 10_000,
    **params: Any,
) -> Sequence:
    seq = Sequence(Request(0, 0, list(prompt), SamplingParams(**params), stream, output), max_len)
    seq.slot = slot
    return seq


def randn(*shape: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def make_sampler(
    vocab_size: int, seqs: list[Sequence], *, eos: tuple[int, ...] = EOS, max_num_seqs: int = 64, may_wait: bool = True
) -> Sampler:
    """A sampler that is prepared for a step of these sequences, in their slots."""
    sampler = Sampler(vocab_size, eos, max_num_seqs=max_num_seqs, device=CPU, use_triton=False)
    sampler._may_wait = may_wait
    sampler.prepare(seqs, [seq.slot for seq in seqs])
    return sampler


def slots_of(seqs: list[Sequence]) -> Tensor:
    return torch.tensor([seq.slot for seq in seqs], dtype=torch.int32)


def outputs_of(seqs: list[Sequence]) -> Tensor:
    return torch.tensor([seq.num_output_tokens for seq in seqs], dtype=torch.int32)


def run(sampler: Sampler, logits: Tensor, seqs: list[Sequence]) -> list[int]:
    return sampler.sample(logits, slots_of(seqs), outputs_of(seqs)).tolist()


def seated(seqs: list[Sequence]) -> list[Sequence]:
    """The sequences, in slots 0, 1, 2 ..."""
    for slot, seq in enumerate(seqs):
        seq.slot = slot
    return seqs


def sample_with(may_wait: bool, logits: Tensor, seqs: list[Sequence], eos: tuple[int, ...] = EOS) -> list[int]:
    """The tokens from a sampler of its own, in slots of their order."""
    seated(seqs)
    return run(make_sampler(logits.shape[1], seqs, eos=eos, max_num_seqs=len(seqs), may_wait=may_wait), logits, seqs)


def sample(logits: Tensor, seqs: list[Sequence]) -> list[int]:
    return sample_with(True, logits, seqs)


@pytest.fixture(params=[True, False], ids=["in parts", "no waiting"])
def may_wait(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


# -- the definition, slow and plain


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> list[int]:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c3 ^ k1, p0 & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return [c0, c1, c2, c3]


def exponential(stream: int, position: int, index: int, level: int) -> float:
    words = philox((index // 4, position, level, 0), (stream & 0xFFFFFFFF, stream >> 32))
    return -math.log((words[index % 4] + 0.5) / 2**32)


def kept_tokens(logits: list[float], params: SamplingParams) -> dict[int, float]:
    """Weight of each token that the filters leave."""
    best = max(logits)
    weights = {token: math.exp((logit - best) / params.temperature) for token, logit in enumerate(logits)}
    if params.top_k:
        bound = sorted(weights.values(), reverse=True)[: params.top_k][-1]
        weights = {token: weight for token, weight in weights.items() if weight >= bound}
    if params.top_p < 1:
        total, mass, bound = sum(weights.values()), 0.0, 0.0
        for bound in sorted(weights.values(), reverse=True):
            mass += bound
            if mass >= params.top_p * total:
                break
        weights = {token: weight for token, weight in weights.items() if weight >= bound}
    return {token: weight for token, weight in weights.items() if weight >= params.min_p}


def reference(logits: Tensor, seq: Sequence) -> int:
    params, stream, position = seq.request.params, seq.request.stream, seq.num_output_tokens
    weights = kept_tokens(logits.tolist(), params)
    groups: dict[int, float] = {}
    for token, weight in weights.items():
        groups[token // GROUP] = groups.get(token // GROUP, 0.0) + weight
    group = max(groups, key=lambda g: groups[g] / exponential(stream, position, g, level=1))
    inside = [token for token in weights if token // GROUP == group]
    return max(inside, key=lambda t: weights[t] / exponential(stream, position, t, level=0))


FILTERS = [
    {},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 200},
    {"top_k": 5_000},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"top_p": 0.99999},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.02},
]


@pytest.mark.parametrize("vocab_size", [3, 256, 1000])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_equals_the_plain_python_reference(vocab_size: int, filters: dict[str, Any]) -> None:
    rng = random.Random(vocab_size)
    logits = randn(12, vocab_size, seed=vocab_size)
    seqs = [
        sequence(
            rng.getrandbits(64), output=(1,) * rng.randrange(50), temperature=rng.choice([0.3, 1.0, 1.7]), **filters
        )
        for _ in range(len(logits))
    ]
    expected = [reference(row, seq) for row, seq in zip(logits, seqs, strict=True)]
    assert [sample_with(may_wait, logits, seqs) for may_wait in (True, False)] == [expected] * 2


def test_flat_rows_whose_top_p_needs_most_of_the_vocabulary(may_wait: bool) -> None:
    logits = randn(6, 3000, scale=0.3)
    seqs = [sequence(row, temperature=1.0, top_p=0.4 + 0.1 * row) for row in range(6)]
    expected = [reference(row, seq) for row, seq in zip(logits, seqs, strict=True)]
    assert sample_with(may_wait, logits, seqs) == expected


# -- both ways, whatever the settings


def random_params(rng: random.Random, vocab_size: int) -> dict[str, Any]:
    def token() -> int:
        return rng.randrange(vocab_size)

    return {
        "temperature": rng.choice([0.0, 1e-30, 0.3, 1.0, 1.7]),
        "top_k": rng.choice([0, 0, 1, 7, 200, vocab_size + 9]),
        "top_p": rng.choice([1.0, 1.0, 0.1, 0.7, 0.95, 0.9999]),
        "min_p": rng.choice([0.0, 0.0, 0.01, 0.3, 1.0]),
        "repetition_penalty": rng.choice([1.0, 1.0, 0.8, 1.3]),
        "presence_penalty": rng.choice([0.0, 0.0, -0.5, 0.7]),
        "frequency_penalty": rng.choice([0.0, 0.0, 0.4]),
        "min_tokens": rng.choice([0, 0, 3]),
        "stop_token_ids": tuple(token() for _ in range(rng.choice([0, 0, 1, 6]))),
        "ignore_eos": rng.random() < 0.3,
        "logit_bias": tuple((token(), rng.uniform(-4, 4)) for _ in range(rng.choice([0, 0, 1, 5]))),
    }


def random_sequence(rng: random.Random, vocab_size: int, slot: int) -> Sequence:
    prompt = tuple(rng.randrange(vocab_size) for _ in range(rng.randint(1, 20)))
    output = tuple(rng.randrange(vocab_size) for _ in range(rng.choice([0, 1, 2, 3, 30])))
    return sequence(rng.getrandbits(64), slot=slot, prompt=prompt, output=output, **random_params(rng, vocab_size))


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), num_rows=st.integers(1, 9), vocab_size=st.sampled_from([3, 256, 700]))
def test_both_ways_give_the_same_tokens(seed: int, num_rows: int, vocab_size: int) -> None:
    rng = random.Random(seed)
    seqs = [random_sequence(rng, vocab_size, slot) for slot in rng.sample(range(64), num_rows)]
    logits = randn(num_rows, vocab_size, seed=seed, scale=rng.choice([0.3, 3.0]))
    in_parts = run(make_sampler(vocab_size, seqs), logits, seqs)
    assert run(make_sampler(vocab_size, seqs, may_wait=False), logits, seqs) == in_parts


@pytest.mark.parametrize(("num_rows", "vocab_size"), [(3000, 900), (24, 70_001)])
def test_both_ways_with_many_rows_or_a_wide_vocabulary(num_rows: int, vocab_size: int) -> None:
    rng = random.Random(3)
    seqs = [random_sequence(rng, vocab_size, slot) for slot in range(num_rows)]
    logits = randn(num_rows, vocab_size, scale=2.0)
    assert sample_with(True, logits, seqs) == sample_with(False, logits, seqs)


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 1.1}, {"temperature": 0.8, "top_p": 0.9, "min_p": 0.01}], ids=str
)
def test_a_row_gets_the_same_tokens_where_more_is_done_for_others(params: dict[str, Any], may_wait: bool) -> None:
    seqs = [sequence(row, slot=row, **params) for row in range(40)]
    logits = randn(41, 1000)
    expected = run(make_sampler(1000, seqs, may_wait=may_wait), logits[:40], seqs)
    demanding = {"top_k": 3, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2}
    seqs.append(sequence(slot=63, temperature=1.0, logit_bias=((3, 1.0),), **demanding))
    seqs.append(sequence(slot=62))
    sampler = make_sampler(1000, seqs, may_wait=may_wait)
    assert sampler.needs == Need(255)
    assert run(sampler, torch.cat((logits, logits[:1])), seqs)[:40] == expected


# -- what a token may depend on


def mixed(num_rows: int) -> list[Sequence]:
    """Neighbours with all kinds of settings, in one step."""
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8},
        {"temperature": 1.3, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 20},
        {"temperature": 0.7, "min_p": 0.05, "repetition_penalty": 1.3},
        {"presence_penalty": 1.0, "frequency_penalty": 0.2},
        {"temperature": 0.9, "min_tokens": 9, "logit_bias": ((7, 4.0),)},
        {"min_tokens": 9},
    ]
    return [
        sequence(1000 + row, output=tuple(range(row % 5)), slot=row, **kinds[row % len(kinds)])
        for row in range(num_rows)
    ]


@pytest.mark.parametrize("num_threads", [1, 2])
def test_bitwise_independent_of_batch_place_and_threads(num_threads: int, may_wait: bool) -> None:
    vocab_size, num_rows = 20_001, 40
    logits, seqs = randn(num_rows, vocab_size, scale=2.0), mixed(40)
    alone = [sample_with(may_wait, logits[row : row + 1], [seqs[row]])[0] for row in range(num_rows)]
    torch.set_num_threads(num_threads)
    assert sample_with(may_wait, logits, seqs) == alone
    for seed in range(3):
        rows = list(range(num_rows))
        random.Random(seed).shuffle(rows)  # another place in the step, and another slot
        rows = rows[: 40 - 13 * seed]
        assert sample_with(may_wait, logits[rows], [seqs[row] for row in rows]) == [alone[row] for row in rows]


def test_weights_are_bitwise_equal_wherever_a_row_stands(may_wait: bool) -> None:
    # The draw would hide a difference in the last bit until it decides a race; so look at the weights themselves.
    vocab_size = 5_003
    logits = randn(9, vocab_size)
    params = {"temperature": 0.7, "top_p": 0.97, "min_p": 1e-4}
    sampler = make_sampler(vocab_size, [sequence(row, slot=row, **params) for row in range(9)])

    def weights(rows: list[int]) -> Tensor:
        work = draw.padded(logits[rows])
        position = torch.zeros(len(rows), dtype=torch.int32)
        race = draw.Race(sampler._tables.settings[rows], position, vocab_size)
        race.run(work, sampler.needs, may_wait=may_wait)
        return work

    together = weights(list(range(9)))
    assert ((together == 0).sum(dim=1) > 100).all()
    for row in range(9):
        assert torch.equal(weights([row])[0], together[row])
        assert torch.equal(weights([8 - row, row])[1], together[row])


def test_the_mass_of_a_row_is_not_split_between_threads() -> None:
    torch.set_num_threads(2)
    weights = randn(3, 200, GROUP).exp()
    together = _mass(weights)
    assert [_mass(weights[row : row + 1]).item() for row in range(3)] == together.tolist()


def test_a_seeded_row_gives_the_same_tokens_whatever_runs_beside_it() -> None:
    vocab_size = 500
    table = randn(vocab_size, vocab_size, seed=4)  # logits as a function of the last token: a model of a kind

    def generate(rows: list[tuple[int | None, int, int]]) -> list[list[int]]:
        seqs = []
        for slot, (seed, row_index, sample_index) in enumerate(rows):
            stream = stream_key(row_seed=seed, job_seed=0, row_index=row_index, sample_index=sample_index)
            seqs.append(sequence(stream, slot=slot, temperature=0.9))
        sampler = make_sampler(vocab_size, seqs, eos=())
        for _ in range(16):
            tokens = run(sampler, table[[seq.tokens[-1] for seq in seqs]], seqs)
            for seq, token in zip(seqs, tokens, strict=True):
                seq.tokens.append(token)
        return [seq.output_token_ids for seq in seqs]

    alone = generate([(42, 0, 0)])[0]
    beside = generate([(None, 1, 0), (42, 7, 0), (1, 2, 0), (42, 0, 1), (42, 3, 0), (None, 1, 1)])
    assert beside[1] == beside[4] == alone  # same seed, wherever the row stands in the input
    assert beside[3] != alone  # another sample of the row
    assert beside[0] != beside[5]  # samples differ without a seed, too
    assert generate([(None, 1, 0)])[0] == beside[0]


def test_positions_draw_different_numbers() -> None:
    seqs = [sequence(3, output=(1,) * position, temperature=1.0) for position in range(64)]
    assert len(set(sample(torch.zeros(64, 1000), seqs))) > 50


def test_logits_are_left_unchanged_and_half_precision_is_drawn_in_float32(may_wait: bool) -> None:
    rng = random.Random(2)
    seqs = [*mixed(16), *(random_sequence(rng, 700, slot) for slot in range(30))]
    logits = randn(46, 700).bfloat16()
    before = logits.clone()
    tokens = sample_with(may_wait, logits, seqs)
    assert torch.equal(logits, before)
    assert tokens == sample_with(may_wait, logits.float(), seqs)


# -- distributions


@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.2}, {"top_p": 0.9, "top_k": 30}], ids=str
)
def test_frequencies_fit_the_probabilities(filters: dict[str, Any]) -> None:
    vocab_size, num_draws = 600, 20_000
    logits = randn(vocab_size, scale=1.0)
    logits[::50] += 4  # some likely tokens, spread over all groups
    seq = sequence(77, temperature=1.2, **filters)
    weights = kept_tokens(logits.tolist(), seq.request.params)
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    sampler, rng = make_sampler(vocab_size, [seq]), random.Random(1)
    for start in range(0, num_draws // 2, 2000):  # of one row, at positions 0, 1, 2 ...
        slots = torch.zeros(2000, dtype=torch.int64)
        tokens = sampler.sample(logits.expand(2000, -1), slots, torch.arange(start, start + 2000))
        counts += torch.bincount(tokens, minlength=vocab_size)
    for _ in range(num_draws // 2 // 2000):  # of many rows
        seqs = [sequence(rng.getrandbits(64), temperature=1.2, **filters) for _ in range(2000)]
        counts += torch.bincount(torch.tensor(sample(logits.expand(2000, -1), seqs)), minlength=vocab_size)
    assert set(counts.nonzero().flatten().tolist()) <= set(weights)
    # Pearson's chi-square over cells of at least 5 expected draws, the rest in one.
    total = sum(weights.values())
    expected = {token: num_draws * weight / total for token, weight in weights.items()}
    large = [token for token in expected if expected[token] >= 5]
    cells = [(int(counts[token]), expected[token]) for token in large]
    rest = num_draws - sum(e for _, e in cells)
    if rest > 5:
        cells.append((num_draws - sum(o for o, _ in cells), rest))
    chi_square = sum((o - e) ** 2 / e for o, e in cells)
    freedom = len(cells) - 1
    assert chi_square < freedom + 4.5 * math.sqrt(2 * freedom)


# -- filters and ties


def distinct_draws(logits: Tensor, may_wait: bool, **params: Any) -> set[int]:
    return set(sample_with(may_wait, logits.expand(400, -1), [sequence(stream, **params) for stream in range(400)]))


def test_top_k_keeps_all_tokens_that_tie_with_the_last(may_wait: bool) -> None:
    logits = torch.full((300,), -9.0)
    logits[[10, 20, 280]] = torch.tensor([3.0, 2.0, 2.0])
    assert distinct_draws(logits, may_wait, temperature=1.0, top_k=2) == {10, 20, 280}
    assert distinct_draws(logits, may_wait, temperature=1.0, top_k=1) == {10}


def test_top_p_keeps_the_smallest_set_that_reaches_p_and_its_ties(may_wait: bool) -> None:
    logits = torch.tensor([0.5, 0.2, 0.1, 0.1, 0.1]).log()
    assert distinct_draws(logits, may_wait, temperature=1.0, top_p=0.45) == {0}
    assert distinct_draws(logits, may_wait, temperature=1.0, top_p=0.69) == {0, 1}
    assert distinct_draws(logits, may_wait, temperature=1.0, top_p=0.75) == {0, 1, 2, 3, 4}


def test_top_p_counts_what_top_k_has_left_as_the_whole(may_wait: bool) -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert distinct_draws(logits, may_wait, temperature=1.0, top_k=2, top_p=0.56) == {0}
    assert distinct_draws(logits, may_wait, temperature=1.0, top_p=0.56) == {0, 1}


def test_min_p_is_a_share_of_the_best(may_wait: bool) -> None:
    logits = torch.tensor([0.5, 0.26, 0.24]).log()
    assert distinct_draws(logits, may_wait, temperature=1.0, min_p=0.5) == {0, 1}


def test_filters_of_one_row_leave_the_others_alone(may_wait: bool) -> None:
    logits = torch.zeros(400, 300)
    seqs = [sequence(s, temperature=1.0, **({"top_p": 0.01, "min_p": 0.9} if s % 2 else {})) for s in range(400)]
    logits[1::2, 7] = 20.0
    tokens = sample_with(may_wait, logits, seqs)
    assert set(tokens[1::2]) == {7}
    assert len(set(tokens[::2])) > 100


@pytest.mark.parametrize("temperature", [1e-4, 1e-30, 1e-300])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    logits = randn(20, 999)
    assert sample(logits, [sequence(row, temperature=temperature) for row in range(20)]) == logits.argmax(1).tolist()


# -- edits of the logits


@pytest.mark.parametrize("vocab_size", [50, 3 * GROUP])
def test_greedy_takes_the_first_of_equal_logits(vocab_size: int) -> None:
    logits = randn(40, vocab_size).round()  # many ties
    logits[0] = 0.0
    seqs = [sequence() for _ in range(40)]
    tokens = sample(logits, seqs)
    assert tokens == [row.index(max(row)) for row in logits.tolist()]
    assert sample(torch.cat([logits, logits], dim=1)[:, :vocab_size], seqs) == tokens


def penalised(logits: list[float], seq: Sequence) -> list[float]:
    params, output = seq.request.params, seq.output_token_ids
    out = list(logits)
    for token in set(seq.tokens):
        value = out[token]
        value = value * params.repetition_penalty if value < 0 else value / params.repetition_penalty
        if token in output:
            value -= params.presence_penalty + params.frequency_penalty * output.count(token)
        out[token] = value
    return out


def test_penalties_equal_their_definition_step_by_step(may_wait: bool) -> None:
    """The sampler is never told a token: it counts those that it has drawn."""
    vocab_size = 40
    kinds = [
        {"repetition_penalty": 1.4},
        {"presence_penalty": 0.8},
        {"frequency_penalty": 0.5},
        {"repetition_penalty": 0.7, "presence_penalty": -0.5, "frequency_penalty": 0.3},
        {},
    ]
    seqs = [sequence(slot=slot, prompt=(3, 3, 9, slot), **kind) for slot, kind in enumerate(kinds)]
    sampler = make_sampler(vocab_size, seqs, eos=(), max_num_seqs=5, may_wait=may_wait)
    for step in range(30):
        logits = randn(len(seqs), vocab_size, seed=step)
        tokens = run(sampler, logits, seqs)
        for row, (seq, token) in enumerate(zip(seqs, tokens, strict=True)):
            expected = penalised(logits[row].tolist(), seq)
            assert token == expected.index(max(expected))
            seq.tokens.append(token)
        if step == 11:  # preempted and back in other slots; two rows are replaced by new ones
            for seq, slot in zip(seqs, (4, 0, 3, 1, 2), strict=True):
                seq.slot = slot
            seqs[1] = sequence(slot=seqs[1].slot, prompt=(7, 8), presence_penalty=1.0)
            seqs[2] = sequence(slot=seqs[2].slot, prompt=(7, 8))
            sampler.prepare(seqs, [seq.slot for seq in seqs])


def test_penalties_apply_before_temperature(may_wait: bool) -> None:
    logits = torch.tensor([[4.0, 3.9, 0.0]]).expand(300, -1)
    seqs = [sequence(s, prompt=(0,), temperature=0.01, repetition_penalty=1.1) for s in range(300)]
    assert set(sample_with(may_wait, logits, seqs, eos=())) == {1}


def test_logit_bias_moves_only_its_own_row(may_wait: bool) -> None:
    logits = torch.zeros(3, 30)
    logits[:, 4] = 1.0
    seqs = [sequence(), sequence(logit_bias=((9, 1.5),)), sequence(logit_bias=((4, -100.0), (9, 0.5), (29, 0.25)))]
    assert sample_with(may_wait, logits, seqs) == [4, 9, 9]


class TestMinTokens:
    """End tokens cannot be drawn before min_tokens tokens are out."""

    logits = torch.zeros(1, 30)
    logits[0, 2], logits[0, 5], logits[0, 8], logits[0, 11] = 9.0, 8.0, 7.0, 6.0

    def token(self, num_output: int, **params: Any) -> int:
        return sample(self.logits, [sequence(output=(20,) * num_output, min_tokens=3, **params)])[0]

    def test_every_end_token_is_held_back(self) -> None:
        assert [self.token(n) for n in range(5)] == [8, 8, 8, 2, 2]

    def test_by_the_number_of_tokens_on_the_device(self, may_wait: bool) -> None:
        seqs = [sequence(slot=0, min_tokens=3), sequence(slot=1, min_tokens=3, ignore_eos=True), sequence(slot=2)]
        sampler = make_sampler(30, seqs, may_wait=may_wait)
        logits, slots = self.logits.expand(3, -1), slots_of(seqs)
        tokens = [sampler.sample(logits, slots, torch.full((3,), number)).tolist() for number in range(5)]
        assert tokens == [[8, 2, 2]] * 3 + [[2, 2, 2]] * 2

    def test_stop_tokens_are_held_back_too(self) -> None:
        assert [self.token(n, stop_token_ids=(8,)) for n in (2, 3)] == [11, 2]

    def test_ignored_end_tokens_are_not(self) -> None:
        assert self.token(0, ignore_eos=True) == 2
        assert self.token(0, ignore_eos=True, stop_token_ids=(2,)) == 5

    def test_with_a_temperature(self) -> None:
        seqs = [sequence(s, min_tokens=1, temperature=1.5) for s in range(300)]
        assert not set(sample(self.logits.expand(300, -1), seqs)) & set(EOS)

    def test_end_tokens_beyond_the_logits_are_no_concern(self) -> None:
        assert sample_with(True, self.logits, [sequence(min_tokens=1)], eos=(2, 5, 31)) == [8]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}, {"repetition_penalty": 1.1}],
    ids=str,
)
def test_logits_that_are_no_numbers_give_no_token(bad: float, params: dict[str, Any], may_wait: bool) -> None:
    vocab_size = 300 if params else 2 * GROUP
    logits = randn(4, vocab_size)
    seqs = [sequence(row, slot=row, **params) for row in range(4)]
    good = sample_with(may_wait, logits, seqs)
    logits[1, :] = -math.inf
    logits[1, 17] = bad
    sampler = make_sampler(vocab_size, seqs, may_wait=may_wait)
    tokens = run(sampler, logits, seqs)
    assert tokens == [good[0], -1, good[2], good[3]]
    assert sampler.ended(torch.tensor(tokens), slots_of(seqs), outputs_of(seqs)).tolist() == [False, True, False, False]


def test_masked_tokens_of_a_model_are_never_drawn() -> None:
    logits = torch.full((300, 600), -math.inf)
    logits[:, [5, 599]] = 0.0
    assert set(sample(logits, [sequence(s, temperature=2.0) for s in range(300)])) == {5, 599}


# -- tables by slot


def test_tables_grow_and_rows_in_them_keep_their_entries() -> None:
    vocab_size = 300
    seqs = [
        sequence(slot=0, min_tokens=9, stop_token_ids=(0,), ignore_eos=True),
        sequence(slot=1, min_tokens=9, ignore_eos=True),
        sequence(slot=2, logit_bias=((0, 2.5), (11, -9.0))),
    ]
    logits = randn(4, vocab_size, scale=1.0)
    logits[:, 0] += 8.0
    sampler = make_sampler(vocab_size, seqs)
    assert (sampler._tables.bias.shape[2], sampler._tables.stops.shape[1]) == (4, 4)
    wide = tuple((token, 0.5 * token) for token in range(30))
    seqs.append(sequence(slot=3, min_tokens=9, stop_token_ids=tuple(range(30)), logit_bias=wide))
    sampler.prepare(seqs[3:], [0, 1, 2, 3])
    assert (sampler._tables.bias.shape[2], sampler._tables.stops.shape[1]) == (32, 32)
    alone = [run(make_sampler(vocab_size, [seq]), logits[row : row + 1], [seq])[0] for row, seq in enumerate(seqs)]
    assert run(sampler, logits, seqs) == alone


def test_a_step_needs_only_what_its_own_rows_need() -> None:
    """Rows that are over cost the others nothing: what they needed is not asked for again."""
    kinds: list[tuple[dict[str, Any], Need]] = [
        ({}, Need.GREEDY),
        ({"temperature": 1.0}, Need.RANDOM),
        ({"temperature": 1.0, "top_k": 5}, Need.RANDOM | Need.TOP_K),
        ({"temperature": 1.0, "top_p": 0.5, "min_p": 0.1}, Need.RANDOM | Need.TOP_P | Need.MIN_P),
        ({"presence_penalty": 0.1}, Need.GREEDY | Need.PENALTIES),
        ({"min_tokens": 1}, Need.GREEDY | Need.MIN_TOKENS),
        ({"logit_bias": ((1, 1.0),)}, Need.GREEDY | Need.BIAS),
        ({"top_k": 5}, Need.GREEDY),  # nothing to filter
    ]
    sampler = make_sampler(50, [sequence(slot=slot, **params) for slot, (params, _) in enumerate(kinds)])
    assert sampler.needs == Need(255)
    for slot, (_, need) in enumerate(kinds):
        sampler.prepare([], [slot])
        assert sampler.needs == need
    sampler.prepare([], [0, 2])
    assert sampler.needs == Need.GREEDY | Need.RANDOM | Need.TOP_K
    sampler.prepare([sequence(slot=2)], [0, 2])  # the slot's next sequence
    assert sampler.needs == Need.GREEDY


def test_rows_that_fill_up_a_step_are_harmless(may_wait: bool) -> None:
    seqs = [sequence(1, slot=0, temperature=1.0, top_p=0.9, frequency_penalty=0.3), sequence(slot=1, min_tokens=2)]
    sampler, alone = (make_sampler(400, seqs, max_num_seqs=2, may_wait=may_wait) for _ in range(2))
    slots = torch.tensor([0, 2, 1, 2, 2])
    for step in range(6):
        logits = randn(5, 400, seed=step)
        num_output = torch.full((5,), step)
        tokens = sampler.sample(logits, slots, num_output)
        real = alone.sample(logits[[0, 2]], slots[[0, 2]], num_output[:2])
        assert tokens[[0, 2]].tolist() == real.tolist()
        assert tokens[[1, 3, 4]].tolist() == logits[[1, 3, 4]].argmax(1).tolist()
        assert not sampler.ended(tokens, slots, num_output)[[1, 3, 4]].any()


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "top_k": 3}], ids=str)
def test_a_step_of_no_rows(params: dict[str, Any], may_wait: bool) -> None:
    sampler = make_sampler(300, [sequence(**params)], may_wait=may_wait)
    none = torch.zeros(0, dtype=torch.int64)
    assert sampler.sample(torch.zeros(0, 300), none, none).tolist() == []
    assert sampler.ended(none, none, none).tolist() == []


# -- the stop check


def ends(seq: Sequence, token: int) -> bool:
    """The rule of the engine, for a token just drawn; stop strings apart."""
    params, num_output = seq.request.params, seq.num_output_tokens + 1
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(EOS))
    armed = num_output >= params.min_tokens
    return token == -1 or (armed and token in stops) or len(seq.tokens) + 1 >= seq.max_len


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_the_stop_check_is_the_engines(seed: int) -> None:
    rng = random.Random(seed)
    seqs = [
        sequence(
            slot=slot,
            prompt=(1,) * rng.randint(1, 3),
            output=(1,) * rng.randint(0, 6),
            max_len=rng.choice([4, 6, 8, 2**40]),
            min_tokens=rng.choice([0, 0, 1, 3, 2**40]),
            ignore_eos=rng.random() < 0.5,
            stop_token_ids=tuple(rng.randrange(8) for _ in range(rng.choice([0, 0, 1, 5]))),
        )
        for slot in rng.sample(range(64), 20)
    ]
    tokens = [rng.randint(-1, 7) for _ in seqs]
    got = make_sampler(100, seqs).ended(torch.tensor(tokens), slots_of(seqs), outputs_of(seqs))
    assert got.dtype == torch.bool
    assert got.tolist() == [ends(seq, token) for seq, token in zip(seqs, tokens, strict=True)]


# -- on a GPU nothing waits for the device


class _NoWaiting(TorchDispatchMode):
    """Refuses the operations that hand a value to the host or have a shape that depends on one."""

    WAIT = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal", "repeat_interleave")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert not name.startswith(self.WAIT), name
        if name in ("index", "index_put", "index_put_"):
            assert all(index is None or index.dtype != torch.bool for index in args[1]), name
        return func(*args, **(kwargs or {}))


def test_the_check_for_waiting_sees_it() -> None:
    with _NoWaiting(), pytest.raises(AssertionError, match="_local_scalar_dense"):
        torch.ones(1).item()


def test_nothing_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(1)
    seqs = [random_sequence(rng, 700, slot) for slot in range(20)]
    logits, slots, num_output = randn(20, 700), slots_of(seqs), outputs_of(seqs)
    sampler = make_sampler(700, seqs[:1], may_wait=False)
    with _NoWaiting(), monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "tolist", None)  # on a CPU it is no operation
        sampler.prepare(seqs, list(range(20)))
        assert sampler.needs == Need(255)
        tokens, ended = sampler.draw(logits, slots, num_output, needs_ended=True)
    assert ended is not None
    assert tokens.tolist() == sample(logits, seqs)
