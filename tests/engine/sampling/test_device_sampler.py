"""The sampler on the device, in plain PyTorch: the same tokens as the host's sampler, and nothing that waits."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from batchjob.core import Sequence
from batchjob.engine.sampling.device_sampler import DeviceSampler, SampleMode
from batchjob.engine.sampling.sampler import GROUP, Sampler
from batchjob.records import Request
from batchjob.sampling import SamplingParams

EOS = (2, 5)
CPU = torch.device("cpu")


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


def device_sampler(vocab_size: int, seqs: list[Sequence], *, max_num_seqs: int = 64) -> DeviceSampler:
    sampler = DeviceSampler(vocab_size, EOS, max_num_seqs=max_num_seqs, device=CPU, use_triton=False)
    for seq in seqs:
        sampler.admit(seq)
    sampler.upload()
    return sampler


def slots_of(seqs: list[Sequence]) -> Tensor:
    return torch.tensor([seq.slot for seq in seqs], dtype=torch.int32)


def outputs_of(seqs: list[Sequence]) -> Tensor:
    return torch.tensor([seq.num_output_tokens for seq in seqs], dtype=torch.int32)


def sample(sampler: DeviceSampler, logits: Tensor, seqs: list[Sequence], mode: SampleMode | None = None) -> list[int]:
    return sampler.sample(logits, mode or sampler.mode, slots_of(seqs), outputs_of(seqs)).tolist()


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


# -- the same tokens as the host's sampler


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), num_rows=st.integers(1, 9), vocab_size=st.sampled_from([3, 256, 700]))
def test_equals_the_hosts_sampler_whatever_the_settings(seed: int, num_rows: int, vocab_size: int) -> None:
    rng = random.Random(seed)
    seqs = [random_sequence(rng, vocab_size, slot) for slot in rng.sample(range(64), num_rows)]
    logits = randn(num_rows, vocab_size, seed=seed, scale=rng.choice([0.3, 3.0]))
    expected = Sampler(vocab_size, EOS).sample(logits, seqs).tolist()
    assert sample(device_sampler(vocab_size, seqs), logits, seqs) == expected


def test_equals_the_hosts_sampler_over_thousands_of_rows() -> None:
    vocab_size, num_rows = 900, 3000
    rng = random.Random(3)
    seqs = [random_sequence(rng, vocab_size, slot) for slot in range(num_rows)]
    logits = randn(num_rows, vocab_size, scale=2.0)
    sampler = device_sampler(vocab_size, seqs, max_num_seqs=num_rows)
    assert sample(sampler, logits, seqs) == Sampler(vocab_size, EOS).sample(logits, seqs).tolist()


def test_a_wide_vocabulary() -> None:
    vocab_size = 70_001
    rng = random.Random(4)
    seqs = [random_sequence(rng, vocab_size, slot) for slot in range(24)]
    logits = randn(24, vocab_size, scale=2.0)
    expected = Sampler(vocab_size, EOS).sample(logits, seqs).tolist()
    assert sample(device_sampler(vocab_size, seqs), logits, seqs) == expected


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 1.1}, {"temperature": 0.8, "top_p": 0.9, "min_p": 0.01}], ids=str
)
def test_every_variant_gives_the_same_tokens(params: dict[str, Any]) -> None:
    seqs = [sequence(row, slot=row, **params) for row in range(40)]
    logits = randn(40, 1000)
    sampler = device_sampler(1000, seqs)
    expected = Sampler(1000, EOS).sample(logits, seqs).tolist()
    assert sample(sampler, logits, seqs) == expected
    narrow = sampler.mode
    sampler.admit(
        sequence(slot=63, temperature=1.0, top_k=3, repetition_penalty=1.1, min_tokens=2, logit_bias=((3, 1.0),))
    )
    sampler.upload()
    assert sampler.mode == SampleMode(True, True, True, True, 4, 4) != narrow
    assert sample(sampler, logits, seqs) == expected


def test_a_token_does_not_depend_on_the_batch() -> None:
    vocab_size = 5_003
    rng = random.Random(8)
    seqs = [random_sequence(rng, vocab_size, slot) for slot in range(30)]
    logits = randn(30, vocab_size)
    together = sample(device_sampler(vocab_size, seqs), logits, seqs)
    for row in range(0, 30, 3):
        alone = device_sampler(vocab_size, [seqs[row]])
        assert sample(alone, logits[row : row + 1], [seqs[row]]) == [together[row]]


def test_frequencies_fit_the_probabilities() -> None:
    num_draws, vocab_size = 20_000, 2 * GROUP + 10
    logits = randn(vocab_size, scale=1.0)
    sampler = device_sampler(vocab_size, [sequence(77, slot=0, temperature=1.3)])
    counts = torch.zeros(vocab_size, dtype=torch.float64)
    for start in range(0, num_draws, 2000):  # one row, at positions 0, 1, 2 ...
        tokens = sampler.sample(
            logits.expand(2000, -1),
            sampler.mode,
            torch.zeros(2000, dtype=torch.int64),
            torch.arange(start, start + 2000),
        )
        counts += torch.bincount(tokens, minlength=vocab_size)
    expected = torch.softmax(logits.double() / 1.3, dim=0) * num_draws
    large = expected >= 5
    cells = [(counts[large], expected[large]), (counts[~large].sum()[None], expected[~large].sum()[None])]
    chi_square = sum(float(((observed - e) ** 2 / e).sum()) for observed, e in cells)
    freedom = int(large.sum())
    assert chi_square < freedom + 4.5 * math.sqrt(2 * freedom)


# -- over many steps


def run_both(vocab_size: int, seqs: list[Sequence], num_steps: int, sampler: DeviceSampler, host: Sampler) -> None:
    """Steps of both; the device's sampler is never told a token. The host's are appended to the sequences."""
    slots, num_output = slots_of(seqs), outputs_of(seqs)
    for step in range(num_steps):
        logits = randn(len(seqs), vocab_size, seed=step)
        got = sampler.sample(logits, sampler.mode, slots, num_output)
        expected = host.sample(logits, seqs).tolist()
        assert got.tolist() == expected
        for seq, token in zip(seqs, expected, strict=True):
            seq.tokens.append(token)
        num_output += 1


def test_penalties_are_counted_on_the_device_and_slots_are_used_again() -> None:
    vocab_size = 40
    kinds: list[dict[str, Any]] = [
        {"repetition_penalty": 1.4},
        {"presence_penalty": 0.8, "temperature": 0.5},
        {"frequency_penalty": 0.5},
        {"repetition_penalty": 0.7, "presence_penalty": -0.5, "frequency_penalty": 0.3, "temperature": 1.0},
        {},
        {"temperature": 1.0, "top_k": 5, "frequency_penalty": 1.0},
    ]
    seqs = [sequence(slot, slot=slot, prompt=(3, 3, 9, slot), **kind) for slot, kind in enumerate(kinds)]
    sampler, host = device_sampler(vocab_size, seqs, max_num_seqs=6), Sampler(vocab_size, EOS)
    run_both(vocab_size, seqs, 25, sampler, host)
    for seq, slot in zip(seqs, (4, 0, 5, 1, 2, 3), strict=True):  # preempted, and back in other slots
        sampler.release(seq.slot)
        seq.slot = slot
    seqs[2] = sequence(9, slot=seqs[2].slot, prompt=(7, 8), presence_penalty=1.0)  # a new row in a used slot
    seqs[3] = sequence(9, slot=seqs[3].slot, prompt=(7, 8))
    for seq in seqs:
        sampler.admit(seq)
    sampler.upload()
    run_both(vocab_size, seqs, 15, sampler, host)


def test_end_tokens_are_held_back_by_the_number_of_tokens_on_the_device() -> None:
    logits = torch.zeros(3, 30)
    logits[:, 2], logits[:, 5], logits[:, 8] = 9.0, 8.0, 7.0
    seqs = [sequence(slot=0, min_tokens=3), sequence(slot=1, min_tokens=3, ignore_eos=True), sequence(slot=2)]
    sampler = device_sampler(30, seqs)
    tokens = [
        sampler.sample(logits, sampler.mode, slots_of(seqs), torch.full((3,), number)).tolist() for number in range(5)
    ]
    assert tokens == [[8, 2, 2]] * 3 + [[2, 2, 2]] * 2


def test_tables_grow_and_rows_in_them_keep_their_entries() -> None:
    vocab_size = 300
    seqs = [
        sequence(slot=0, min_tokens=9, stop_token_ids=(0,), ignore_eos=True),
        sequence(slot=1, min_tokens=9, ignore_eos=True),
        sequence(slot=2, logit_bias=((0, 2.5), (11, -9.0))),
    ]
    logits = randn(4, vocab_size, scale=1.0)
    logits[:, 0] += 8.0
    sampler = device_sampler(vocab_size, seqs)
    before = sampler.mode
    seqs.append(
        sequence(
            slot=3,
            min_tokens=9,
            stop_token_ids=tuple(range(30)),
            logit_bias=tuple((token, 0.5 * token) for token in range(30)),
        )
    )
    sampler.admit(seqs[3])
    sampler.upload()
    assert (before.bias_width, before.stop_width) == (4, 4)
    assert (sampler.mode.bias_width, sampler.mode.stop_width) == (32, 32)
    assert sample(sampler, logits, seqs) == Sampler(vocab_size, EOS).sample(logits, seqs).tolist()


# -- variants


def test_the_mode_follows_the_admitted_slots() -> None:
    sampler = device_sampler(50, [sequence(slot=0)])
    assert sampler.mode == SampleMode()
    assert not sampler.mode.edited
    for slot, params in enumerate(
        [
            {"temperature": 1.0},
            {"temperature": 1.0, "top_k": 5},
            {"presence_penalty": 0.1},
            {"min_tokens": 1},
            {"logit_bias": ((1, 1.0),)},
            {"top_k": 5},  # greedy: nothing to filter
        ],
        start=1,
    ):
        sampler.admit(sequence(slot=slot, **params))
        sampler.upload()
    assert sampler.mode == SampleMode(True, True, True, True, 4, 4)
    sampler.release(2)
    assert sampler.mode == SampleMode(True, False, True, True, 4, 4)
    sampler.admit(sequence(slot=1))  # in place of a row that was never released
    sampler.release(5)
    sampler.release(5)
    assert sampler.mode == SampleMode(False, False, True, True, 0, 4)
    for slot in range(7):
        sampler.release(slot)
    assert sampler.mode == SampleMode()


def test_padding_rows_are_harmless() -> None:
    seqs = [sequence(1, slot=0, temperature=1.0, top_p=0.9, frequency_penalty=0.3), sequence(slot=1, min_tokens=2)]
    sampler, alone = device_sampler(400, seqs, max_num_seqs=2), device_sampler(400, seqs, max_num_seqs=2)
    slots = torch.tensor([0, 2, 1, 2, 2])
    for step in range(6):
        logits = randn(5, 400, seed=step)
        num_output = torch.full((5,), step)
        tokens = sampler.sample(logits, sampler.mode, slots, num_output)
        real = alone.sample(logits[[0, 2]], alone.mode, slots[[0, 2]], num_output[:2])
        assert tokens[[0, 2]].tolist() == real.tolist()
        assert tokens[[1, 3, 4]].tolist() == logits[[1, 3, 4]].argmax(1).tolist()
        assert not sampler.ended(tokens, slots, num_output)[[1, 3, 4]].any()


def test_a_step_of_no_rows() -> None:
    sampler = device_sampler(300, [sequence(temperature=1.0, top_k=3)])
    none = torch.zeros(0, dtype=torch.int64)
    assert sampler.sample(torch.zeros(0, 300), sampler.mode, none, none).tolist() == []
    assert sampler.ended(none, none, none).tolist() == []


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}, {"presence_penalty": 1.0}]
)
def test_logits_that_are_no_numbers_give_no_token(bad: float, params: dict[str, Any]) -> None:
    vocab_size = 300
    seqs = [sequence(row, slot=row, **params) for row in range(4)]
    logits = randn(4, vocab_size)
    good = sample(device_sampler(vocab_size, seqs), logits, seqs)
    logits[1, :] = -math.inf
    logits[1, 17] = bad
    sampler = device_sampler(vocab_size, seqs)
    tokens = sample(sampler, logits, seqs)
    assert tokens == [good[0], -1, good[2], good[3]]
    assert sampler.ended(torch.tensor(tokens), slots_of(seqs), outputs_of(seqs)).tolist() == [False, True, False, False]


def test_logits_are_left_unchanged_and_half_precision_is_drawn_in_float32() -> None:
    rng = random.Random(2)
    seqs = [random_sequence(rng, 700, slot) for slot in range(30)]
    logits = randn(30, 700).bfloat16()
    before = logits.clone()
    tokens = sample(device_sampler(700, seqs), logits, seqs)
    assert torch.equal(logits, before)
    assert tokens == sample(device_sampler(700, seqs), logits.float(), seqs)
    assert tokens == Sampler(700, EOS).sample(logits, seqs).tolist()


# -- the stop check


def ends(seq: Sequence, token: int) -> bool:
    """The rule of the engine, for a token just made; stop strings apart."""
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
    got = device_sampler(100, seqs).ended(torch.tensor(tokens), slots_of(seqs), outputs_of(seqs))
    assert got.dtype == torch.bool
    assert got.tolist() == [ends(seq, token) for seq, token in zip(seqs, tokens, strict=True)]


# -- nothing waits for the device


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
    sampler = device_sampler(700, seqs[:1])
    for seq in seqs:
        sampler.admit(seq)
    with _NoWaiting(), monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "tolist", None)  # on a CPU it is no operation
        sampler.upload()
        assert sampler.mode == SampleMode(True, True, True, True, 8, 8)
        tokens = sampler.sample(logits, sampler.mode, slots, num_output)
        sampler.ended(tokens, slots, num_output)
    assert tokens.tolist() == Sampler(700, EOS).sample(logits, seqs).tolist()
