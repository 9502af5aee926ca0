"""The tokenizer of Transformers. No torch; Transformers is imported only when an `HFTokenizer` is made."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from batchjob.errors import InputDataError, InputMissingError
from batchjob.prompts.tokenizer import Message, RenderError, TokenizerPanic


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
            if not isinstance(error, Exception) and not is_panic(error):
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
            raise without_panic(error) from error.__cause__

    def render_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **variables
            )
        except BaseException as error:  # a template may fail in any way; the row fails, not the job
            if isinstance(error, MemoryError) or not (isinstance(error, Exception) or is_panic(error)):
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
            raise without_panic(error) from error.__cause__
        return text

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        return list(self._tokenizer.convert_ids_to_tokens(list(ids)))


def is_panic(error: BaseException) -> bool:
    """True for a panic in Rust: PyO3 makes no Exception of it, so that no handler passes over it."""
    return not isinstance(error, Exception) and type(error).__name__ == "PanicException"


def without_panic(error: BaseException) -> BaseException:
    return TokenizerPanic(f"{error}" or "a panic in native code") if is_panic(error) else error
