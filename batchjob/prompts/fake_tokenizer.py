"""A tokenizer that needs no model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any
from zlib import crc32

from batchjob.prompts.tokenizer import Message

_FIRST_WORD = 4
_NUM_WORDS = 256
_FIRST_HASHED = _FIRST_WORD + _NUM_WORDS
_WORDS = tuple(
    start + end
    for start in "ba be bi bo da de di do ka ke ki ko ma me mi mo".split()
    for end in "l n r s t la na ra sa ta le ne re se te li".split()
)
_FAKE_SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")


class FakeTokenizer:
    """One token per space-separated word: fast and deterministic, for tests and `--engine fake`.

    Ids: 1 begins a text (`<s>`), 2 ends one, 4..259 are a fixed list of words (what the fake engine answers with),
    the rest up to 65,535 are hashes of words. Runs of spaces give empty words, so that blank texts differ.
    """

    bos_token_id: int = 1
    bos_token: str = "<s>"
    eos_token_ids: tuple[int, ...] = (2,)
    has_chat_template: bool = True
    vocab_size: int = 65_536
    special_tokens: tuple[str, ...] = ("<s>", "</s>")
    max_token_chars: int = 1 << 40  # a word may have any length

    def __init__(self) -> None:
        self._ids: dict[str, int] = {"<s>": 1, "</s>": 2}
        self._ids.update((word, _FIRST_WORD + index) for index, word in enumerate(_WORDS))

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids = [1] if add_special_tokens else []
        while text.startswith("<s>"):
            ids.append(1)
            text = text[3:]
        if not text:
            return ids
        known = self._ids
        words = text.split(" ")
        try:
            ids += [known[word] for word in words]
        except KeyError:
            ids += [self._id(word) for word in words]
        return ids

    def _id(self, word: str) -> int:
        found = self._ids.get(word)
        if found is None:
            found = _FIRST_HASHED + crc32(word.encode()) % (self.vocab_size - _FIRST_HASHED)
            if len(self._ids) < 1 << 14:  # a cache, bounded
                self._ids[word] = found
        return found

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        return [self.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    def render_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any) -> str:
        variables.pop("continue_final_message", None)
        turns = [f"[{name}] {json.dumps(value, ensure_ascii=False)}" for name, value in variables.items()]
        turns += [f"[{message['role']}] {message['content']}" for message in messages]
        return "<s>" + " ".join([*turns, "[assistant]"] if add_generation_prompt else turns)

    def template_mentions(self, name: str) -> bool:
        return name != "strftime_now"

    def set_clock(self, now: datetime) -> bool:
        return True

    def unknown_ids(self, vocab_size: int) -> list[int]:
        return list(range(self.vocab_size, vocab_size))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        if not skip_special_tokens:
            return " ".join(self.convert_ids_to_tokens(ids))
        return " ".join([_WORDS[i - 4] if i < _FIRST_HASHED else f"<{i}>" for i in ids if i >= _FIRST_WORD])

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        return [_FAKE_SPECIAL[i] if i < _FIRST_WORD else self.decode([i]) for i in ids]
