"""The sampler against a plain-Python reference, and what a row's tokens may depend on."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from batchjob.core import Sequence
from batchjob.engine.sampling.filters import _mass
from batchjob.engine.sampling.sampler import GROUP, Sampler
from batchjob.records import Request, stream_key
from batchjob.sampling import SamplingParams

EOS = (2, 5)


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def sequence(
    stream: int = 0, *, prompt: tuple[int, ...] = (1,), output: tuple[int, ...] = (), slot: int = 0, **params: Any
) -> Sequence:
    seq = Sequence(Request(0, 0, list(prompt), SamplingParams(**params), stream), max_len=10_000)
    seq.tokens += output
    seq.slot = slot
    return seq


def randn(*shape: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


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
    got = Sampler(vocab_size, EOS).sample(logits, seqs)
    assert got.tolist() == [reference(row, seq) for row, seq in zip(logits, seqs, strict=True)]


def test_flat_rows_whose_top_p_needs_most_of_the_vocabulary() -> None:
    logits = randn(6, 3000, scale=0.3)
    seqs = [sequence(row, temperature=1.0, top_p=0.4 + 0.1 * row) for row in range(6)]
    got = Sampler(3000, EOS).sample(logits, seqs)
    assert got.tolist() == [reference(row, seq) for row, seq in zip(logits, seqs, strict=True)]


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
def test_bitwise_independent_of_batch_place_and_threads(num_threads: int) -> None:
    vocab_size, num_rows = 20_001, 40
    logits, seqs = randn(num_rows, vocab_size, scale=2.0), mixed(40)
    alone = [int(Sampler(vocab_size, EOS).sample(logits[row : row + 1], [seqs[row]])) for row in range(num_rows)]
    torch.set_num_threads(num_threads)
    sampler = Sampler(vocab_size, EOS)
    assert sampler.sample(logits, seqs).tolist() == alone
    for seed in range(3):
        rows = list(range(num_rows))
        random.Random(seed).shuffle(rows)
        rows = rows[: 40 - 13 * seed]
        for slot, row in enumerate(rows):
            seqs[row].slot = slot  # another place in the runner, too
        assert sampler.sample(logits[rows], [seqs[row] for row in rows]).tolist() == [alone[row] for row in rows]


def test_weights_are_bitwise_equal_wherever_a_row_stands() -> None:
    # The draw would hide a difference in the last bit until it decides a race; so look at the weights themselves.
    vocab_size = 5_003
    logits = randn(9, vocab_size)
    params = {"temperature": 0.7, "top_p": 0.97, "min_p": 1e-4}

    def weights(rows: list[int]) -> Tensor:
        sampler = Sampler(vocab_size, EOS)
        sampler.sample(logits[rows], [sequence(row, **params) for row in rows])
        return sampler._scratch[: len(rows)].clone()

    together = weights(list(range(9)))
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
        sampler = Sampler(vocab_size, ())
        seqs = []
        for slot, (seed, row_index, sample_index) in enumerate(rows):
            stream = stream_key(row_seed=seed, job_seed=0, row_index=row_index, sample_index=sample_index)
            seqs.append(sequence(stream, slot=slot, temperature=0.9))
        for _ in range(16):
            tokens = sampler.sample(table[[seq.tokens[-1] for seq in seqs]], seqs).tolist()
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
    logits = torch.zeros(64, 1000)
    seqs = [sequence(3, output=(1,) * position, temperature=1.0) for position in range(64)]
    assert len(set(Sampler(1000, EOS).sample(logits, seqs).tolist())) > 50


def test_logits_are_left_unchanged() -> None:
    logits = randn(16, 700)
    before = logits.clone()
    Sampler(700, EOS).sample(logits, mixed(16))
    assert torch.equal(logits, before)


def test_half_precision_logits_are_drawn_in_float32() -> None:
    logits = randn(8, 700).bfloat16()
    seqs = mixed(8)
    assert torch.equal(Sampler(700, EOS).sample(logits, seqs), Sampler(700, EOS).sample(logits.float(), seqs))


# -- distributions


@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.2}, {"top_p": 0.9, "top_k": 30}], ids=str
)
def test_frequencies_fit_the_probabilities(filters: dict[str, Any]) -> None:
    vocab_size, num_draws = 600, 20_000
    logits = randn(vocab_size, scale=1.0)
    logits[::50] += 4  # some likely tokens, spread over all groups
    seq = sequence(0, temperature=1.2, **filters)
    weights = kept_tokens(logits.tolist(), seq.request.params)
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    sampler, rng = Sampler(vocab_size, EOS), random.Random(1)
    for _ in range(num_draws // 2000):
        seqs = [sequence(rng.getrandbits(64), temperature=1.2, **filters) for _ in range(2000)]
        counts += torch.bincount(sampler.sample(logits.expand(2000, -1), seqs), minlength=vocab_size)
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


def distinct_draws(logits: Tensor, **params: Any) -> set[int]:
    seqs = [sequence(stream, **params) for stream in range(400)]
    return set(Sampler(len(logits), EOS).sample(logits.expand(400, -1), seqs).tolist())


def test_top_k_keeps_all_tokens_that_tie_with_the_last() -> None:
    logits = torch.full((300,), -9.0)
    logits[[10, 20, 280]] = torch.tensor([3.0, 2.0, 2.0])
    assert distinct_draws(logits, temperature=1.0, top_k=2) == {10, 20, 280}
    assert distinct_draws(logits, temperature=1.0, top_k=1) == {10}


def test_top_p_keeps_the_smallest_set_that_reaches_p_and_its_ties() -> None:
    logits = torch.tensor([0.5, 0.2, 0.1, 0.1, 0.1]).log()
    assert distinct_draws(logits, temperature=1.0, top_p=0.45) == {0}
    assert distinct_draws(logits, temperature=1.0, top_p=0.69) == {0, 1}
    assert distinct_draws(logits, temperature=1.0, top_p=0.75) == {0, 1, 2, 3, 4}


def test_top_p_counts_what_top_k_has_left_as_the_whole() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert distinct_draws(logits, temperature=1.0, top_k=2, top_p=0.56) == {0}
    assert distinct_draws(logits, temperature=1.0, top_p=0.56) == {0, 1}


def test_min_p_is_a_share_of_the_best() -> None:
    logits = torch.tensor([0.5, 0.26, 0.24]).log()
    assert distinct_draws(logits, temperature=1.0, min_p=0.5) == {0, 1}


def test_filters_of_one_row_leave_the_others_alone() -> None:
    logits = torch.zeros(400, 300)
    seqs = [sequence(s, temperature=1.0, **({"top_p": 0.01, "min_p": 0.9} if s % 2 else {})) for s in range(400)]
    logits[1::2, 7] = 20.0
    tokens = Sampler(300, EOS).sample(logits, seqs)
    assert set(tokens[1::2].tolist()) == {7}
    assert len(set(tokens[::2].tolist())) > 100


@pytest.mark.parametrize("temperature", [1e-4, 1e-30, 1e-300])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    logits = randn(20, 999)
    seqs = [sequence(row, temperature=temperature) for row in range(20)]
    assert torch.equal(Sampler(999, EOS).sample(logits, seqs), logits.argmax(1))


# -- edits of the logits


@pytest.mark.parametrize("vocab_size", [50, 3 * GROUP])
def test_greedy_takes_the_first_of_equal_logits(vocab_size: int) -> None:
    logits = randn(40, vocab_size).round()  # many ties
    logits[0] = 0.0
    tokens = Sampler(vocab_size, EOS).sample(logits, [sequence()] * 40)
    assert tokens.tolist() == [row.index(max(row)) for row in logits.tolist()]
    strided = torch.cat([logits, logits], dim=1)[:, :vocab_size]
    assert torch.equal(Sampler(vocab_size, EOS).sample(strided, [sequence()] * 40), tokens)


@pytest.mark.parametrize("vocab_size", [50, 3 * GROUP])
def test_a_step_that_samples_nothing_gives_no_tokens(vocab_size: int) -> None:
    assert Sampler(vocab_size, EOS).sample(torch.zeros(0, vocab_size), []).tolist() == []


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


def test_penalties_equal_their_definition_step_by_step() -> None:
    vocab_size = 40
    sampler, rng = Sampler(vocab_size, ()), random.Random(5)
    kinds = [
        {"repetition_penalty": 1.4},
        {"presence_penalty": 0.8},
        {"frequency_penalty": 0.5},
        {"repetition_penalty": 0.7, "presence_penalty": -0.5, "frequency_penalty": 0.3},
        {},
    ]
    seqs = [sequence(slot=slot, prompt=(3, 3, 9, slot), **kind) for slot, kind in enumerate(kinds)]
    for step in range(30):
        logits = randn(len(seqs), vocab_size, seed=step)
        tokens = sampler.sample(logits, seqs).tolist()
        for row, (seq, token) in enumerate(zip(seqs, tokens, strict=True)):
            expected = penalised(logits[row].tolist(), seq)
            assert token == expected.index(max(expected))
            seq.tokens.append(token)
        if step == 11:  # preempted and back in other slots; one row is replaced by a new one
            for seq, slot in zip(seqs, rng.sample(range(5), 5), strict=True):
                seq.slot = slot
            seqs[1] = sequence(slot=seqs[1].slot, prompt=(7, 8), presence_penalty=1.0)


def test_penalties_apply_before_temperature() -> None:
    logits = torch.tensor([[4.0, 3.9, 0.0]]).expand(300, -1)
    seqs = [sequence(s, prompt=(0,), temperature=0.01, repetition_penalty=1.1) for s in range(300)]
    assert set(Sampler(3, ()).sample(logits, seqs).tolist()) == {1}


def test_logit_bias_moves_only_its_own_row() -> None:
    logits = torch.zeros(3, 30)
    logits[:, 4] = 1.0
    seqs = [sequence(), sequence(logit_bias=((9, 1.5),)), sequence(logit_bias=((4, -100.0), (9, 0.5), (29, 0.25)))]
    assert Sampler(30, EOS).sample(logits, seqs).tolist() == [4, 9, 9]


class TestMinTokens:
    """End tokens cannot be drawn before min_tokens tokens are out."""

    logits = torch.zeros(1, 30)
    logits[0, 2], logits[0, 5], logits[0, 8], logits[0, 11] = 9.0, 8.0, 7.0, 6.0

    def token(self, num_output: int, **params: Any) -> int:
        seq = sequence(output=(20,) * num_output, min_tokens=3, **params)
        return int(Sampler(30, EOS).sample(self.logits, [seq]))

    def test_every_end_token_is_held_back(self) -> None:
        assert [self.token(n) for n in range(5)] == [8, 8, 8, 2, 2]

    def test_stop_tokens_are_held_back_too(self) -> None:
        assert [self.token(n, stop_token_ids=(8,)) for n in (2, 3)] == [11, 2]

    def test_ignored_end_tokens_are_not(self) -> None:
        assert self.token(0, ignore_eos=True) == 2
        assert self.token(0, ignore_eos=True, stop_token_ids=(2,)) == 5

    def test_with_a_temperature(self) -> None:
        seqs = [sequence(s, min_tokens=1, temperature=1.5) for s in range(300)]
        assert not set(Sampler(30, EOS).sample(self.logits.expand(300, -1), seqs).tolist()) & set(EOS)

    def test_end_tokens_beyond_the_logits_are_no_concern(self) -> None:
        assert int(Sampler(30, (2, 5, 31)).sample(self.logits, [sequence(min_tokens=1)])) == 8


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"repetition_penalty": 1.1}], ids=str)
def test_logits_that_are_no_numbers_give_no_token(bad: float, params: dict[str, Any]) -> None:
    vocab_size = 300 if params else 2 * GROUP
    logits = randn(4, vocab_size)
    seqs = [sequence(row, slot=row, **params) for row in range(4)]
    good = Sampler(vocab_size, EOS).sample(logits, seqs).tolist()
    logits[1, :] = -math.inf
    logits[1, 17] = bad
    assert Sampler(vocab_size, EOS).sample(logits, seqs).tolist() == [good[0], -1, good[2], good[3]]


def test_masked_tokens_of_a_model_are_never_drawn() -> None:
    logits = torch.full((300, 600), -math.inf)
    logits[:, [5, 599]] = 0.0
    tokens = Sampler(600, EOS).sample(logits, [sequence(s, temperature=2.0) for s in range(300)])
    assert set(tokens.tolist()) == {5, 599}
