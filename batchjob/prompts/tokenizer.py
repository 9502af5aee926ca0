"""Text to token ids and back: the protocol of tokenizers, their errors, and `load_tokenizer`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

from batchjob.errors import UnsupportedModelError
from batchjob.models.tokenizer_files import text_digest

Message = Mapping[str, Any]


class TokenizerPanic(Exception):
    """Native code of the tokeniser met something that it holds to be impossible. The message is its own."""


class RenderError(Exception):
    """The chat template refused one conversation. The message is the template's own."""


class RenderTimeout(BaseException):
    """Raised inside a template that takes too long; no `except Exception` on the way may catch it."""


class Tokenizer(Protocol):
    """The part of a tokenizer that the feeder and the engine use.

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
        `continue_final_message` and others that the template knows. Raises RenderError."""
        ...

    def template_mentions(self, name: str) -> bool:
        """True if the chat template can make use of a variable of this name."""
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
    from batchjob.prompts.fake_tokenizer import FakeTokenizer
    from batchjob.prompts.hf_tokenizer import HFTokenizer

    if name == "fake":
        return FakeTokenizer()
    tokenizer = HFTokenizer(name)
    if digest and text_digest(tokenizer.path) != digest:  # looked at after they were read, so these were read
        raise UnsupportedModelError(
            f"the tokenizer or chat template in {name} changed since this run began; put the old files back to go on, "
            "or give another --output"
        )
    return tokenizer
