"""Text to token ids and back: one protocol, Transformers' tokenizer behind it, and a fake one that needs no model.

No torch. Transformers is imported only when an `HFTokenizer` is made.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol
from zlib import crc32

from batchjob.errors import InputDataError, InputMissingError, UnsupportedModelError
from batchjob.models.tokenizer_files import text_digest

Message = Mapping[str, Any]


class TokenizerPanic(Exception):
    """Native code of the tokeniser met something that it holds to be impossible. The message is its own."""


class RenderError(Exception):
    """The chat template refused one conversation. The message is the template's own."""


class Tokenizer(Protocol):
    """What the feeder and the engine need of a tokenizer.

    `special_tokens` are the texts that encode to control tokens; `max_token_chars` bounds the characters of text that
    one token can stand for.
    """

    @property
    def bos_token_id(self) -> int | None: ...
    @property
    def bos_token(self) -> str | None: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    @property
    def has_chat_template(self) -> bool: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def special_tokens(self) -> tuple[str, ...]: ...
    @property
    def max_token_chars(self) -> int: ...

    def unknown_ids(self, vocab_size: int) -> list[int]:
        """Ids below `vocab_size` that stand for no token: models pad their vocabulary."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]: ...
    def render_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """The conversation as one text, special tokens included. `variables` are `tools`, `documents`,
        `continue_final_message` and whatever else the template knows. Raises RenderError."""
        ...

    def template_mentions(self, name: str) -> bool:
        """Whether the chat template can make use of a variable of this name."""
        ...

    def set_clock(self, now: datetime) -> bool:
        """Stops the clock of chat templates (`strftime_now`) in this process. False where that cannot be done."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the ids, by default without special tokens; no spaces are "cleaned up"."""
        ...

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]: ...


def load_tokenizer(name: str, digest: str = "") -> Tokenizer:
    """`"fake"` gives the FakeTokenizer, anything else is a local directory with a tokenizer.

    With the `text_digest` of a job's model its files must still be those. Raises UnsupportedModelError.
    """
    if name == "fake":
        return FakeTokenizer()
    tokenizer = HFTokenizer(name)
    if digest and text_digest(tokenizer.path) != digest:  # looked at after they were read, so these were read
        raise UnsupportedModelError(
            f"the tokenizer or chat template in {name} changed since this run began; put the old files back to go on, "
            "or give another --output"
        )
    return tokenizer


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


class HFTokenizer:
    """A tokenizer that Transformers loads from a local directory. No remote code, no network."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise InputMissingError(f"tokenizer directory {self.path} does not exist")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                str(self.path), local_files_only=True, trust_remote_code=False
            )
            self._backend = self._fast_backend()
        except BaseException as error:  # Transformers raises many kinds here
            if not isinstance(error, Exception) and not _is_panic(error):
                raise
            reason = f"{error}" or type(error).__name__
            raise InputDataError(f"the tokenizer in {self.path} cannot be loaded: {reason}") from error

    def _fast_backend(self) -> Any:
        """The Rust tokenizer without its Python wrapper (twice as fast), where both agree; else None."""
        backend: Any = getattr(self._tokenizer, "backend_tokenizer", None)
        if not hasattr(backend, "encode_batch_fast"):
            return None
        backend.no_truncation()  # a tokenizer.json may carry these from its training
        backend.no_padding()
        probes = ["Hello, world!", " a  b\n", "", "\u00e9\u4f60\U0001f642", *self._tokenizer.all_special_tokens[:2]]
        for special in (True, False):
            expected = self._call(probes, special)
            if [e.ids for e in backend.encode_batch_fast(probes, add_special_tokens=special)] != expected:
                return None
        backend.no_truncation()
        backend.no_padding()
        return backend

    def _call(self, texts: Sequence[str], special: bool) -> list[list[int]]:
        encoded = self._tokenizer(
            list(texts),
            add_special_tokens=special,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return list(encoded["input_ids"])

    @property
    def bos_token_id(self) -> int | None:
        value: int | None = self._tokenizer.bos_token_id
        return value

    @property
    def bos_token(self) -> str | None:
        value: str | None = self._tokenizer.bos_token
        return value

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        value = self._tokenizer.eos_token_id
        return () if value is None else (int(value),)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    @property
    def vocab_size(self) -> int:
        return len(self._tokenizer)

    @cached_property
    def special_tokens(self) -> tuple[str, ...]:
        """Those that Transformers knows by their role, and those that the tokenizer's file marks as special."""
        added = self._tokenizer.added_tokens_decoder.values()
        marked = [token.content for token in added if token.special]
        return tuple(dict.fromkeys([*self._tokenizer.all_special_tokens, *marked]))

    @property
    def max_token_chars(self) -> int:
        if not hasattr(self, "_max_token_chars"):
            self._max_token_chars = max(map(len, self._tokenizer.get_vocab()), default=1)
        return self._max_token_chars

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        if not texts:
            return []
        backend = self._backend
        try:
            if backend is None:
                return self._call(texts, add_special_tokens)
            return [e.ids for e in backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)]
        except BaseException as error:
            raise _without_panic(error) from error.__cause__

    def render_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **variables
            )
        except BaseException as error:  # a template may fail in any way; the row fails, not the job
            if isinstance(error, MemoryError) or not (isinstance(error, Exception) or _is_panic(error)):
                raise
            raise RenderError(f"{error or type(error).__name__}") from error
        return text

    @property
    def _templates(self) -> list[str]:
        templates = self._tokenizer.chat_template or ""
        return list(templates.values()) if isinstance(templates, dict) else [templates]

    def template_mentions(self, name: str) -> bool:
        return any(re.search(rf"\b{re.escape(name)}\b", text) for text in self._templates)

    def set_clock(self, now: datetime) -> bool:
        """Transformers lets no function into a template as a variable, so it goes to the compiled template, which is
        kept for every later use."""
        try:
            from transformers.utils.chat_template_utils import _compile_jinja_template

            for text in self._templates:
                _compile_jinja_template(text).globals["strftime_now"] = lambda format: now.strftime(format)
        except (ImportError, AttributeError, TypeError):
            return False
        except Exception:  # no valid template: rendering says so
            return True
        return True

    def unknown_ids(self, vocab_size: int) -> list[int]:
        known = set(self._tokenizer.get_vocab().values())
        unknown = [token for token in range(vocab_size) if token not in known]
        # Of ids with the same text, get_vocab names one: the others stand for a token as well.
        backend: Any = getattr(self._tokenizer, "backend_tokenizer", None)
        if hasattr(backend, "id_to_token"):
            return [token for token in unknown if backend.id_to_token(token) is None]
        if len(known) < len(self._tokenizer):
            first = max(len(self._tokenizer), max(known, default=-1) + 1)
            return [token for token in unknown if token >= first]
        return unknown

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        # A slow tokenizer puts spaces around the special tokens that it keeps, unless told not to.
        kept = {} if skip_special_tokens else {"spaces_between_special_tokens": False}
        try:
            text: str = self._tokenizer.decode(
                ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False, **kept
            )
        except BaseException as error:
            raise _without_panic(error) from error.__cause__
        return text

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        return list(self._tokenizer.convert_ids_to_tokens(list(ids)))


class RenderTimeout(BaseException):
    """Raised inside a template that takes too long; no `except Exception` on the way may catch it."""


def _is_panic(error: BaseException) -> bool:
    """What PyO3 makes of a panic in Rust is no Exception, so that nobody passes over it."""
    return not isinstance(error, Exception) and type(error).__name__ == "PanicException"


def _without_panic(error: BaseException) -> BaseException:
    return TokenizerPanic(f"{error}" or "a panic in native code") if _is_panic(error) else error
