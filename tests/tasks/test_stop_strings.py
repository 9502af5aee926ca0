"""Stop strings: what they do is a function of the text, for every way to cut it into pieces."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchjob.sampling import SamplingParams
from batchjob.tasks.stop_strings import StopStrings


def all_cuts(text: str) -> Iterator[list[str]]:
    """Every way to cut a text into pieces: 2 ** (len - 1) of them."""
    for cuts in itertools.product((False, True), repeat=len(text) - 1):
        ends = [index + 1 for index, cut in enumerate(cuts) if cut] + [len(text)]
        yield [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


class Pieces:
    """A tokenizer whose token i is the i-th of some texts; the first `num_special` are special tokens."""

    def __init__(self, pieces: list[str], num_special: int = 0) -> None:
        self.pieces = pieces
        self.special_tokens = pieces[:num_special]

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        first = len(self.special_tokens) if skip_special_tokens else 0
        return "".join(self.pieces[token] for token in ids if token >= first)


def feed(pieces: list[str], stop: tuple[str, ...], *, include_stop: bool = False) -> tuple[str, bool]:
    return feed_ids(Pieces(pieces), list(range(len(pieces))), stop, include_stop=include_stop)


def feed_ids(
    tokenizer: Pieces, ids: list[int], stop: tuple[str, ...], *, include_stop: bool = False
) -> tuple[str, bool]:
    strings = StopStrings(tokenizer, SamplingParams(stop=stop, include_stop=include_stop))
    for count, token in enumerate(ids, 1):
        if strings.push(token, armed=True):
            return strings.text(ids[:count]), True
    return (strings.text(ids), True) if strings.flush(armed=True) else (tokenizer.decode(ids), False)


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

    @staticmethod
    def strings(pieces: list[str], *stop: str) -> StopStrings:
        return StopStrings(Pieces(pieces), SamplingParams(stop=stop))

    def test_one_complete_too_early_does_not_cut_later(self) -> None:
        strings = self.strings(["a;", " b", " c;"], ";")
        assert not strings.push(0, armed=False)
        assert not strings.push(1, armed=True)
        assert strings.push(2, armed=True)
        assert strings.text([0, 1, 2]) == "a; b c"

    def test_a_short_one_complete_too_early_is_not_found_again_beside_a_long_one(self) -> None:
        strings = self.strings(["xab", "c", "d"], "ab", "a long one")
        assert not strings.push(0, armed=False)
        assert not strings.push(1, armed=True)
        assert not strings.push(2, armed=True)
        assert not strings.flush(armed=True)

    def test_one_that_began_early_but_is_complete_in_time_cuts(self) -> None:
        strings = self.strings(["x EN", "D y"], "END")
        assert not strings.push(0, armed=False)
        assert strings.push(1, armed=True)
        assert strings.text([0, 1]) == "x "


class Always:
    """Decodes by the number of ids."""

    special_tokens = ()

    def __init__(self, texts: dict[int, str]) -> None:
        self.texts = texts

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return self.texts[len(ids)]


def test_text_that_comes_all_at_the_end_is_searched_too() -> None:
    # A decoder that holds everything back until the flush.
    strings = StopStrings(Always({1: "\ufffd", 2: "\ufffd", 3: "\ufffd"}), SamplingParams(stop=("\ufffd",)))
    assert not strings.push(5, armed=True)
    assert not strings.push(6, armed=True)
    assert strings.flush(armed=True)
    assert strings.text([5, 6]) == ""


def test_cost_does_not_grow_with_the_text_before() -> None:
    decoded = 0

    class Counting:
        special_tokens = ()

        def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
            nonlocal decoded
            decoded += len(ids)
            return "".join(map(chr, ids))

    strings = StopStrings(Counting(), SamplingParams(stop=("#", "a much longer one, of more characters than a window")))
    for _ in range(5_000):
        assert not strings.push(ord("a"), armed=True)
    assert decoded < 5_000 * 20
    assert strings.push(ord("#"), armed=True)
    assert strings.text([ord("a")] * 5_000 + [ord("#")]) == "a" * 5_000


class TestSpecialTokens:
    """A stop string that names special tokens is looked for where they are."""

    TOKENIZER = Pieces(["<s>", "<|im|>", "us", "er", " hi", "<|im|>", "\n"], num_special=2)

    def outcome(self, ids: list[int], *stop: str, include_stop: bool = False) -> tuple[str, bool]:
        return feed_ids(self.TOKENIZER, ids, stop, include_stop=include_stop)

    def test_a_special_token_and_text(self) -> None:
        assert self.outcome([4, 1, 2, 3, 4], "<|im|>user") == (" hi", True)

    def test_the_output_has_no_special_token_even_where_the_stop_string_is_kept(self) -> None:
        assert self.outcome([4, 1, 2, 3, 4], "<|im|>user", include_stop=True) == (" hiuser", True)
        assert self.outcome([0, 4, 1, 2, 3, 4], "<|im|>us") == (" hi", True)

    def test_text_before_the_special_token(self) -> None:
        assert self.outcome([4, 4, 6, 1, 2], "i\n<|im|>") == (" hi h", True)
        assert self.outcome([4, 6, 1, 2], "i\n<|im|>", include_stop=True) == (" hi\n", True)

    def test_the_same_text_made_of_ordinary_tokens_stops_too_and_only_special_tokens_are_left_out(self) -> None:
        assert self.outcome([5, 1, 4, 5, 2, 3], "<|im|>user") == ("<|im|> hi", True)

    def test_beside_others_the_one_that_is_complete_first_counts(self) -> None:
        assert self.outcome([4, 6, 1, 2, 3], "<|im|>user", "\n") == (" hi", True)
        assert self.outcome([4, 1, 2, 3, 6], "<|im|>user", "\n") == (" hi", True)

    def test_of_two_that_are_complete_together_the_longest_counts_in_whichever_text_it_is(self) -> None:
        assert self.outcome([4, 1, 2, 3], "<|im|>user", "er") == (" hi", True)
        assert self.outcome([4, 1, 2, 3], " hi<|im|>user", "user") == ("", True)

    def test_an_ordinary_one_is_found_across_a_special_token_as_in_the_output(self) -> None:
        assert self.outcome([4, 2, 1, 3], "user") == (" hi", True)

    @given(st.lists(st.integers(0, 6), max_size=30), st.booleans())
    def test_equals_the_definition_on_random_tokens(self, ids: list[int], include_stop: bool) -> None:
        stop = "er<|im|>us"
        expected: tuple[str, bool] = self.TOKENIZER.decode(ids), False
        for count in range(1, len(ids) + 1):
            text = self.TOKENIZER.decode(ids[:count], skip_special_tokens=False)
            if (at := text.find(stop)) >= 0:
                marked = [(token, char) for token in ids[:count] for char in self.TOKENIZER.pieces[token]]
                kept = marked[: at + len(stop) * include_stop]
                expected = "".join(char for token, char in kept if token >= 2), True
                break
        assert self.outcome(ids, stop, include_stop=include_stop) == expected
