"""Incremental detokenisation: what is certain is the decoded whole, for byte-level and byte-fallback tokenizers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from batchjob.sampling import SamplingParams
from batchjob.tasks.stop_strings import IncrementalDetokenizer, StopStrings

TEXTS = [
    "\U0001f600\U0001f600",
    "\U0001f468\u200d\U0001f373 cooks",  # joined by a zero-width joiner
    "via \U0001f1eb\U0001f1f7 or \U0001f1ee\U0001f1f9",
    "\U0001f44b\U0001f3fb\U0001f44b\U0001f3fe",
    "key 7\ufe0f\u20e3 here",
    "明日は雨でしょう。",
    "고맙습니다",
    "धन्यवाद मित्र",
    "ขอบคุณมาก",
    "شكرا جزيلا",
    "r\u00e9sum\u00e9",
    "re\u0301sume\u0301",
    "\U0001d4d0 = \U0001d4d1\u00b3",
    "p\u200bq\u200cr\ufeffs",
    "lost \ufffd kept",
    "ends so \ufffd",
    "done \u2714\ufe0f",
    "\U0001f680 up",
    "\U0001f353" * 25,
    "co\u00f6perate \u2013 \u201cso\u201d \u2026 5 \u00a3",
    "  two spaces,\n\n\ttabs  ",
    "plain words and nothing else, but so many of them that the window is cut more than once on the way to the end",
]
CORPUS = ["the cook and the words are kept \U0001f600 明日は雨 résumé धन्यवाद", "spaces and words, words and spaces"] * 3


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    )
    return tokenizer


def byte_fallback() -> Tokenizer:
    """SentencePiece as in Llama 2: words start with a visible space, unknown characters become bytes."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in ["\u2581", *"abcdefghijklmnopqrstuvwxyz", "th", "the", "\u2581the", "or", "wor", "\u2581wor", "明"]:
        vocab.setdefault(piece, len(vocab))
    merges = [("t", "h"), ("th", "e"), ("\u2581", "the"), ("o", "r"), ("w", "or"), ("\u2581", "wor")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


FALLBACK = byte_fallback()


@pytest.fixture(
    scope="module", params=["byte_level", "byte_fallback", pytest.param("smollm2", marks=pytest.mark.real_model)]
)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    if request.param == "smollm2":
        path: Path = request.getfixturevalue("smollm2")
        return Tokenizer.from_file(str(path / "tokenizer.json"))
    return {"byte_level": byte_level, "byte_fallback": byte_fallback}[request.param]()


def pieces_of(decode: Callable[[list[int]], str], groups: Iterable[list[int]]) -> list[str]:
    """What became certain with each push and with the flush, for decoders that never take text back."""
    detokenizer = IncrementalDetokenizer(decode)
    pieces = []
    for group in groups:
        detokenizer.push(group)
        pieces.append(detokenizer.text[detokenizer.num_known : detokenizer.num_certain])
    detokenizer.flush()
    return [*pieces, detokenizer.text[detokenizer.num_known :]]


def random_groups(ids: list[int], rng: random.Random, longest: int = 7) -> list[list[int]]:
    groups = []
    while ids:
        size = rng.randint(1, longest)
        groups.append(ids[:size])
        ids = ids[size:]
    return groups


@pytest.mark.parametrize("text", TEXTS)
def test_one_by_one_equals_the_whole_and_shows_no_replacement_marks(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == text
    pieces = pieces_of(tokenizer.decode, [[token] for token in ids])
    assert "".join(pieces) == text
    assert sum(piece.count("\ufffd") for piece in pieces) == text.count("\ufffd")


@pytest.mark.parametrize("text", TEXTS)
def test_every_grouping_equals_the_whole(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    if len(ids) <= 9:
        for cuts in itertools.product((False, True), repeat=len(ids) - 1):
            ends = [index + 1 for index, cut in enumerate(cuts) if cut] + [len(ids)]
            groups = [ids[start:end] for start, end in zip([0, *ends], ends, strict=False)]
            assert "".join(pieces_of(tokenizer.decode, groups)) == text
    else:
        for seed in range(60):
            groups = random_groups(ids, random.Random(seed))
            assert "".join(pieces_of(tokenizer.decode, groups)) == text


def test_text_is_given_out_as_soon_as_it_is_certain(tokenizer: Any) -> None:
    ids = tokenizer.encode("or the \U0001f600 the", add_special_tokens=False).ids
    detokenizer = IncrementalDetokenizer(tokenizer.decode)
    text = ""
    for count, token in enumerate(ids, start=1):
        detokenizer.push([token])
        text += detokenizer.text[detokenizer.num_known : detokenizer.num_certain]
        assert text == tokenizer.decode(ids[:count]).rstrip("\ufffd")


@settings(max_examples=150)
@given(st.lists(st.integers(0, 255), max_size=60), st.randoms(use_true_random=False))
def test_bytes_that_are_no_text_come_out_as_the_decoder_shows_them(ids: list[int], rng: random.Random) -> None:
    # A model may emit any tokens at all; a byte-level decoder replaces each bad sequence where it stands.
    def decode(ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")

    assert "".join(pieces_of(decode, random_groups(ids, rng))) == decode(ids)


@settings(max_examples=100)
@given(st.text(max_size=40), st.randoms(use_true_random=False))
def test_any_text_survives_byte_fallback(text: str, rng: random.Random) -> None:
    ids = FALLBACK.encode(text, add_special_tokens=False).ids
    assert "".join(pieces_of(FALLBACK.decode, random_groups(ids, rng))) == FALLBACK.decode(ids)


def test_special_tokens_in_between_take_no_space_away() -> None:
    tokenizer = byte_fallback()
    tokenizer.add_special_tokens(["</s>"])
    word = tokenizer.token_to_id("\u2581the")
    ids = [word] * 20 + [2] * 20 + [word]
    pieces = pieces_of(tokenizer.decode, [[token] for token in ids])
    assert "".join(pieces) == tokenizer.decode(ids) == " ".join(["the"] * 21)


def test_replacement_marks_without_end_are_given_out_at_last() -> None:
    pieces = pieces_of(lambda ids: "\ufffd" * len(ids), [[7]] * 400)
    assert len("".join(pieces[:-1])) > 200
    assert "".join(pieces) == "\ufffd" * 400


class Fallback:
    special_tokens = ()

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return str(FALLBACK.decode(ids))


FALLBACK_IDS = [FALLBACK.token_to_id(piece) for piece in ("the", "or", "\u2581wor", "\u2581", "d", "明")]
BYTES = [3 + byte for byte in (*"é明".encode(), 0xF0, 0x9F, 0x80)]


@settings(max_examples=400)
@given(
    st.lists(st.sampled_from(FALLBACK_IDS + BYTES), max_size=40), st.sampled_from(["wor", "d", "é", "orthe", "\ufffd"])
)
def test_a_stop_string_cuts_the_decoded_whole_also_where_a_decoder_takes_text_back(ids: list[int], stop: str) -> None:
    # A broken byte turns the whole run of bytes before it into U+FFFD, characters that had been complete included.
    for include_stop in (False, True):
        strings = StopStrings(Fallback(), SamplingParams(stop=(stop,), include_stop=include_stop))
        matched = next((count for count, token in enumerate(ids, 1) if strings.push(token, armed=True)), None)
        if matched is None and strings.flush(armed=True):
            matched = len(ids)
        if matched is None:
            assert stop not in FALLBACK.decode(ids)
            continue
        whole = FALLBACK.decode(ids[:matched])
        text = strings.text(ids[:matched])
        assert whole.startswith(text)
        assert text.endswith(stop) if include_stop else whole[len(text) :].startswith(stop)
        assert stop not in FALLBACK.decode(ids[: matched - 1]).rstrip("\ufffd")
