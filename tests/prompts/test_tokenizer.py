"""The fake tokenizer's promises, and the real one against Transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchjob.errors import InputDataError, InputMissingError, UnsupportedModelError
from batchjob.models.tokenizer_files import text_digest
from batchjob.prompts import PromptBuilder
from batchjob.prompts.fake_tokenizer import FakeTokenizer
from batchjob.prompts.hf_tokenizer import HFTokenizer
from batchjob.prompts.tokenizer import RenderError, load_tokenizer
from batchjob.records import Record

fake = FakeTokenizer()


@given(st.text("ab <s>\n\u00e9"), st.booleans())
def test_fake_ids_are_deterministic_and_in_range(text: str, special: bool) -> None:
    ids = fake.encode(text, add_special_tokens=special)
    assert ids == FakeTokenizer().encode(text, add_special_tokens=special)
    assert all(0 < token < fake.vocab_size for token in ids)
    assert ids[:1] == [1] or not special
    assert len(ids) - special == (0 if not text else len(ids) - special)


def test_fake_output_words_round_trip() -> None:
    ids = list(range(4, 260))
    text = fake.decode([1, *ids, 2])
    assert len(set(text.split(" "))) == 256
    assert fake.encode(text, add_special_tokens=False) == ids
    assert fake.decode([4, 300]) == fake.decode([4]) + " <300>"


def test_fake_text_is_cheap_to_tell_apart() -> None:
    texts = ["", " ", "  ", "\n", "a", "a ", " a", "a b"]
    assert len({tuple(fake.encode(text, add_special_tokens=False)) for text in texts}) == len(texts)


TEXTS = ["", " ", "Hello, world!", "a\tb\r\n  c", "\u00e9\u4f60\U0001f642", "x<|im_end|>y</s>", "<s>begin", "None"]


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("special", [True, False])
def test_ids_are_those_of_transformers(tokenizer_dir: Callable[..., Path], adds_bos: bool, special: bool) -> None:
    from transformers import AutoTokenizer

    path = tokenizer_dir(adds_bos=adds_bos)
    ours, theirs = HFTokenizer(path), AutoTokenizer.from_pretrained(path)
    expected = [theirs.encode(text, add_special_tokens=special) for text in TEXTS]
    assert ours.encode_batch(TEXTS, add_special_tokens=special) == expected
    assert [ours.encode(text, add_special_tokens=special) for text in TEXTS] == expected
    for ids in expected:
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert ours._call(TEXTS, special) == expected  # the way for tokenizers without a fast backend


def test_truncation_left_in_a_tokenizer_file_is_switched_off(
    tokenizer_dir: Callable[..., Path], tmp_path: Path
) -> None:
    from tokenizers import Tokenizer as Backend

    path = tmp_path / "tokenizer"
    shutil.copytree(tokenizer_dir(), path)
    backend = Backend.from_file(str(path / "tokenizer.json"))
    backend.enable_truncation(max_length=4)
    backend.enable_padding(length=8)
    backend.save(str(path / "tokenizer.json"))
    tokenizer = HFTokenizer(path)
    assert len(tokenizer.encode("x" * 50, add_special_tokens=False)) == 50
    assert len(tokenizer.encode("x", add_special_tokens=False)) == 1


def test_what_a_tokenizer_says_about_itself(hf: Callable[..., HFTokenizer]) -> None:
    tokenizer = hf()
    assert (tokenizer.bos_token_id, tokenizer.bos_token, tokenizer.eos_token_ids) == (1, "<s>", (2,))
    assert tokenizer.vocab_size == 261
    assert tokenizer.has_chat_template
    assert not hf(None).has_chat_template
    assert set(tokenizer.special_tokens) == {"<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"}
    assert tokenizer.convert_ids_to_tokens([1, 2]) == ["<s>", "</s>"]
    with pytest.raises(RenderError, match="alternate"):
        tokenizer.render_chat([{"role": "assistant", "content": "x"}])


def test_loading_says_what_is_missing(tmp_path: Path) -> None:
    assert isinstance(load_tokenizer("fake"), FakeTokenizer)
    with pytest.raises(InputMissingError, match="gone"):
        load_tokenizer(str(tmp_path / "gone"))
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(InputDataError, match="cannot be loaded"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "tokenizer_config.json"])
def test_a_tokenizer_that_changed_since_the_run_began_is_refused(
    name: str, tokenizer_dir: Callable[..., Path], tmp_path: Path
) -> None:
    path = tmp_path / "tokenizer"
    shutil.copytree(tokenizer_dir(), path)
    (path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    digest = text_digest(path)
    assert isinstance(load_tokenizer(str(path), digest), HFTokenizer)
    if name == "tokenizer_config.json":
        (path / name).write_text(json.dumps({**json.loads((path / name).read_text()), "more": 1}))
    else:
        (path / name).write_text((path / name).read_text() + "\n\n")
    with pytest.raises(UnsupportedModelError, match="changed since this run began"):
        load_tokenizer(str(path), digest)


def test_a_giant_text_never_reaches_the_tokenizer(
    builder: Callable[..., PromptBuilder], record: Callable[..., Record], hf: Callable[..., HFTokenizer]
) -> None:
    tokenizer = hf()
    seen: list[int] = []
    real = tokenizer.encode_batch

    def spy(texts: list[str], *, add_special_tokens: bool) -> list[list[int]]:
        seen.extend(len(text) for text in texts if len(text) > 10)
        return real(texts, add_special_tokens=add_special_tokens)

    tokenizer.encode_batch = spy  # type: ignore[method-assign]
    giant = "x" * 1_500_000
    error = builder(["prompt"], tokenizer).build(record(prompt=giant)).error
    assert error is not None
    assert error.type == "prompt_too_long"
    assert "at least" in error.message
    assert seen == []
    for policy in ("truncate-left", "truncate-right"):
        prompt = builder(["prompt"], tokenizer, length_policy=policy).build(record(prompt=giant))
        assert 0 < len(prompt.token_ids) < 1000
    assert seen == [1_000_000, 1_000_000]


def test_ids_that_share_their_text_stand_for_a_token_each(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocab = [("<unk>", 0.0), ("a", -1.0), ("b", -1.0), ("a", -2.0)]
    backend = Tokenizer(models.Unigram(vocab, unk_id=0))
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>").save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).unknown_ids(7) == [4, 5, 6]
