"""Conversations through the model's chat template, with bounds on its time, memory and text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any

from batchjob.errors import UsageError
from batchjob.prompts import forms, limits
from batchjob.prompts.paths import look_up_or_none
from batchjob.prompts.tokenizer import Message, RenderError, RenderTimeout, Tokenizer

if TYPE_CHECKING:
    from batchjob.prompts.builder import PromptConfig


class ChatRenderer:
    """Renders the conversations of a job; does nothing where no row of the job can be one.

    Raises UsageError at once where the job needs a chat template and the tokenizer has none, one that is too slow or
    one that refuses the job's system message. `warnings` are about the job's flags and this tokenizer.
    """

    def __init__(self, config: PromptConfig, tokenizer: Tokenizer) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._source = config.source
        self.wraps_text = config.chat or config.system is not None  # text becomes the user's turn
        self._renders = self.wraps_text or config.source.kind in ("messages", "any")
        self._timer = limits.Timer(config.render_seconds)
        self.warnings: list[str] = []
        if (self.wraps_text or config.source.kind == "messages") and not tokenizer.has_chat_template:
            raise UsageError(
                "the model's tokenizer has no chat template: use an instruction-tuned model, or send text with "
                "--prompt and without --chat, --system and --messages"
            )
        if self._renders and tokenizer.template_mentions("strftime_now"):
            now = datetime.now() if config.clock is None else datetime.fromisoformat(config.clock)
            if not tokenizer.set_clock(now):
                self.warnings.append(
                    "the chat template writes the date, and this version of Transformers has no way to give all "
                    "processes of a job the same: each takes its own"
                )
        if self._renders:
            self._probe()

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Bounds on time and memory around the rendering of some rows."""
        if not self._renders:
            yield
            return
        with self._timer.installed(), limits.memory_limit(limits.RENDER_MEMORY):
            yield

    def _probe(self) -> None:
        """A template that cannot render one short turn in time would fail every row, slowly."""
        system = self._config.system
        user = {"role": "user", "content": "Hello"}
        try:
            with self.guarded(), self._timer:
                alone = self._tokenizer.render_chat([user])
        except RenderTimeout:
            limit = f"{self._config.render_seconds:g} s"
            raise UsageError(f"the model's chat template takes longer than {limit} for one short message") from None
        except (RenderError, MemoryError):
            return  # it may want other turns; each row finds out for itself
        if system is None:
            return
        remedy = "leave --system out, or put its text before the prompt's: --prompt 'TEXT {column}' --chat"
        try:
            with self.guarded(), self._timer:
                text = self._tokenizer.render_chat([{"role": "system", "content": system}, user])
        except RenderError as error:
            if self._source.kind != "any" and not self._source.chat_columns:  # then every row has it
                raise UsageError(f"the model's chat template refuses a system message ({error}): {remedy}") from None
        except (RenderTimeout, MemoryError):
            pass
        else:
            if system and text == alone:
                self.warnings.append(f"the model's chat template leaves the system message out: {remedy}")

    def turns(self, text: str) -> list[Message]:
        """The conversation of one text."""
        turns: list[Message] = [{"role": "user", "content": text}]
        if self._config.system is not None:
            turns.insert(0, {"role": "system", "content": self._config.system})
        return turns

    def render(self, fields: Mapping[str, Any], messages: Sequence[Message]) -> str:
        """The text of a row's conversation, under `guarded`. Raises InvalidPrompt, RenderError, RenderTimeout and
        MemoryError."""
        if not self._tokenizer.has_chat_template:
            raise RenderError("the model's tokenizer has no chat template")
        variables = forms.chat_variables({path: look_up_or_none(fields, path) for path in self._source.chat_columns})
        with self._timer:
            text = self._tokenizer.render_chat(messages, **variables)
        if len(text) > self._config.render_chars:
            raise RenderError(f"it wrote {len(text):,} characters, more than {self._config.render_chars:,}")
        return text
