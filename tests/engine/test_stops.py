"""Stop strings: what they do is a function of the text, for every way to cut it into pieces."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchjob.engine.stops import StopMatcher, StopStrings
from batchjob.sampling import SamplingParams


def all_cuts(text: str) -> Iterator[list[str]]:
    """Every way to cut a text into pieces: 2 ** (len - 1) of them."""
    for cuts in itertools.product((False, True), repeat=len(text) - 1):
        ends = [index + 1 for index, cut in enumerate(cuts) if cut] + [len(text)]
        yield [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def feed(pieces: list[str], stop: tuple[str, ...], *, include_stop: bool = False) -> tuple[str, bool]:
    matcher = StopMatcher(stop, include_stop=include_stop)
    matched = any(matcher.feed(piece) for piece in pieces)  # nothing is fed after a match
    return matcher.text, matched


@pytest.mark.parametrize(
    ("text", "stop", "expected", "matched"),
    [
        ("so 9.\n\nQ: next", ("\n\nQ:",), "so 9.", True),  # spans several pieces
        ("a rehearsal", ("hear",), "a re", True),  # inside a word
        ("STOP here", ("STOP",), "", True),  # at the very start
        ("well--- on", ("--",), "well", True),  # a piece may be longer than the stop string
        ("xxxy now", ("xxy",), "x", True),  # a false start before the real one
        ("almost STO", ("STOP",), "almost STO", False),  # an unfinished one at the end is given back
        ("a line\n", ("\n\n",), "a line\n", False),
        ("それ。はい", ("。",), "それ", True),
        ("go \U0001f6d1 more", ("\U0001f6d1",), "go ", True),
        ("one; two, 3", (",", ";"), "one", True),  # the first in the text, whatever their order
        ("one; two, 3", (";", ","), "one", True),
        ("no yes ok", (" yes",), "no", True),
        ("P. it ends", ("STOP",), "P. it ends", False),  # the prompt ended in "STO"
        ("abcde", ("abcd", "bc"), "a", True),  # the one that is complete first
        ("abcde", ("c", "abc"), "", True),  # complete at the same character: the longest
        ("mississippi", ("issip",), "miss", True),  # overlaps itself
        ("e\u0301cole", ("\u00e9",), "e\u0301cole", False),  # composed and decomposed are different texts
    ],
)
def test_every_way_to_cut_the_text_gives_the_same_result(
    text: str, stop: tuple[str, ...], expected: str, matched: bool
) -> None:
    assert {feed(pieces, stop) for pieces in all_cuts(text)} == {(expected, matched)}


def test_include_stop_keeps_the_stop_string_and_nothing_after_it() -> None:
    results = {feed(pieces, (";",), include_stop=True) for pieces in all_cuts("a = 1;\nb = 2;")}
    assert results == {("a = 1;", True)}


def reference(text: str, stop: tuple[str, ...]) -> tuple[str, bool]:
    """The definition: walk character by character, cut before the longest stop string that ends here."""
    for end in range(1, len(text) + 1):
        complete = [s for s in stop if text[:end].endswith(s)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


@given(
    st.text("ab.", max_size=30),
    st.lists(st.text("ab.", min_size=1, max_size=5), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
)
def test_equals_the_definition_on_random_texts_and_cuts(text: str, stop: list[str], rng: random.Random) -> None:
    pieces, rest = [], text
    while rest:
        size = rng.randint(0, 4)
        pieces.append(rest[:size])
        rest = rest[size:]
    assert feed(pieces, tuple(stop)) == reference(text, tuple(stop))


class TestArmed:
    """A stop string counts if it is complete when enough tokens are out, and is passed over for good if before."""

    def test_one_complete_too_early_does_not_cut_later(self) -> None:
        matcher = StopMatcher((";",))
        assert not matcher.feed("a;", armed=False)
        assert not matcher.feed(" b", armed=True)
        assert matcher.feed(" c;", armed=True)
        assert matcher.text == "a; b c"

    def test_a_short_one_complete_too_early_is_not_found_again_beside_a_long_one(self) -> None:
        matcher = StopMatcher(("ab", "a long one"))
        assert not matcher.feed("xab", armed=False)
        assert not matcher.feed("c", armed=True)
        assert not matcher.feed("d", armed=True)
        assert matcher.text == "xabcd"

    def test_one_that_began_early_but_is_complete_in_time_cuts(self) -> None:
        matcher = StopMatcher(("END",))
        assert not matcher.feed("x EN", armed=False)
        assert matcher.feed("D y", armed=True)
        assert matcher.text == "x "


def test_text_that_comes_all_at_the_end_is_searched_too() -> None:
    # A decoder that holds everything back until the flush.
    texts = {1: "\ufffd", 2: "\ufffd", 3: "\ufffd"}
    strings = StopStrings(lambda ids: texts[len(ids)], SamplingParams(stop=("\ufffd",)))
    assert not strings.push(5, armed=True)
    assert not strings.push(6, armed=True)
    assert strings.flush(armed=True)
    assert strings.text == ""


def test_cost_does_not_grow_with_the_text_before() -> None:
    decoded = 0

    def decode(ids: list[int]) -> str:
        nonlocal decoded
        decoded += len(ids)
        return "".join(map(chr, ids))

    strings = StopStrings(decode, SamplingParams(stop=("#",)))
    for _ in range(5_000):
        assert not strings.push(ord("a"), armed=True)
    assert decoded < 5_000 * 20
    assert strings.push(ord("#"), armed=True)
    assert strings.text == "a" * 5_000
