"""Philox: the published test vectors, a plain-Python reference, and independence of what stands beside it."""

from __future__ import annotations

import random

import pytest
import torch

from batchjob.engine.sampling.philox import exponential, philox4x32


def reference(counter: tuple[int, ...], key: tuple[int, ...]) -> list[int]:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c3 ^ k1, p0 & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return [c0, c1, c2, c3]


def draw(counter: tuple[int, ...], key: tuple[int, ...]) -> list[int]:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    k0, k1 = (torch.tensor([word]) for word in key)
    return philox4x32((c0, c1, c2, c3), (k0, k1))[0].tolist()


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_published_vectors(counter: tuple[int, ...], key: tuple[int, ...], words: str) -> None:
    assert [f"{word:08x}" for word in draw(counter, key)] == words.split()


def test_equals_plain_python_on_random_counters() -> None:
    rng = random.Random(1)
    cases = [[rng.getrandbits(32) for _ in range(6)] for _ in range(200)]
    c0, c1, c2, c3, k0, k1 = torch.tensor(cases).unbind(1)
    got = philox4x32((c0, c1, c2, c3), (k0, k1))
    assert got.tolist() == [reference(tuple(case[:4]), tuple(case[4:])) for case in cases]


def test_words_broadcast_over_rows_and_columns() -> None:
    zero = torch.tensor(0)
    rows, columns = torch.arange(3)[:, None], torch.arange(5)
    got = philox4x32((columns, rows, zero, zero), (rows + 7, zero))
    assert got.shape == (3, 5, 4)
    assert got[2, 4].tolist() == reference((4, 2, 0, 0), (9, 0))


def test_exponential_is_finite_and_positive_at_both_ends() -> None:
    ends = exponential(torch.tensor([0, 0xFFFFFFFF]))
    assert 22 < ends[0] < 23
    assert 0 < ends[1] < 1e-9


def test_exponential_does_not_depend_on_the_place_in_a_tensor() -> None:
    words = torch.tensor([random.Random(2).getrandbits(32) for _ in range(997)])
    whole = exponential(words)
    for start, stop in [(0, 1), (1, 2), (3, 10), (500, 997), (996, 997)]:
        assert torch.equal(exponential(words[start:stop]), whole[start:stop])


def test_exponential_has_the_right_mean_and_tail() -> None:
    zero = torch.tensor(0)
    words = philox4x32((torch.arange(50_000), zero, zero, zero), (zero, zero)).flatten()
    draws = exponential(words)
    assert abs(draws.mean().item() - 1) < 0.01
    assert abs((draws > 3).double().mean().item() - 0.049787) < 0.002
