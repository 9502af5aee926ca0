"""`PromptBuilder`: a `Record` becomes a `Prompt`, token ids and settings, or a row error. Nothing here stops a job.

Rules. Text is encoded with the special tokens that the tokenizer adds, a rendered chat without: its template has
written them. Where text begins with the start token and the tokenizer adds one more, one of the two is dropped.
Special tokens inside row text are encoded as Transformers encodes them. The template is applied once, with the
generation prompt, and a row can never bring its own template.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from batchjob.prompts import forms, limits
from batchjob.prompts.chat import ChatRenderer
from batchjob.prompts.params import RowParams
from batchjob.prompts.paths import look_up, look_up_or_none
from batchjob.prompts.source import DEFAULTS, PromptSource, parse_template
from batchjob.prompts.tokenizer import RenderError, RenderTimeout, Tokenizer
from batchjob.records import Prompt, Record, RowError
from batchjob.sampling import SamplingParams

_LONG_TEXT = 1_000_000  # characters; below this a text is always tokenised, to state its exact length


@dataclass(frozen=True, slots=True)
class PromptConfig:
    """All that prompts depend on. `vocab_size` and `max_model_len` are the model's, `sampling` the job's."""

    source: PromptSource
    sampling: SamplingParams
    max_model_len: int
    vocab_size: int
    chat: bool = False
    system: str | None = None
    length_policy: str = "error"
    special_tokens: Mapping[str, int] = field(default_factory=dict)  # text -> id; as stop strings they stop by id
    clock: str | None = None  # ISO 8601, local: what the chat template takes for now; None is each process's own now
    render_seconds: float = limits.RENDER_SECONDS
    render_chars: int = limits.RENDER_CHARS


class PromptBuilder:
    """Makes the prompts of a job. `warnings` are about the job's flags and this tokenizer. Raises UsageError at once
    where the job needs a chat template that it cannot use, see `ChatRenderer`."""

    def __init__(self, config: PromptConfig, tokenizer: Tokenizer) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._source = config.source
        self._chat = ChatRenderer(config, tokenizer)
        self._parts = parse_template(config.source.template)
        bos = tokenizer.bos_token_id
        adds_bos = bos is not None and tokenizer.encode("", add_special_tokens=True)[:1] == [bos]
        self._added_bos = bos if adds_bos else None
        self.warnings = self._chat.warnings
        self._params = RowParams(config.source.params or "", config.sampling, config.vocab_size, config.special_tokens)
        self._max_chars = max(_LONG_TEXT, config.max_model_len * tokenizer.max_token_chars)
        if not self._chat.wraps_text and config.source.kind in ("text", "template", "any"):
            self._warn_of_end_token()

    def _warn_of_end_token(self) -> None:
        plain, special = (self._tokenizer.encode("a", add_special_tokens=special) for special in (False, True))
        if plain and special[-1:] != plain[-1:]:
            (token,) = self._tokenizer.convert_ids_to_tokens(special[-1:])
            self.warnings.append(
                f"the tokenizer puts {token} behind each text, which tells most models that the text is over; use "
                "--chat or token ids, or take it out of the tokenizer (add_eos_token, post_processor)"
            )

    def build(self, record: Record) -> Prompt:
        return self.build_many([record])[0]

    def build_many(self, records: Sequence[Record], beat: Callable[[], None] | None = None) -> list[Prompt]:
        """One Prompt per record, in order. `beat` is called whenever one more of them has its text."""
        jobs = [_Row(record) for record in records]
        with self._chat.guarded():
            for job in jobs:
                self._compose(job)
                if beat is not None:
                    beat()
        self._encode([job for job in jobs if job.error is None and job.text is not None and job.special], True)
        self._encode([job for job in jobs if job.error is None and job.text is not None and not job.special], False)
        return [self._finish(job) for job in jobs]

    def refuse(self, record: Record, error: RowError) -> Prompt:
        """The row with an error, for which only its settings are looked at: they say how many samples fail."""
        job = _Row(record)
        if self._source.params is not None:
            params = self._row_params(record.fields)
            job.params = None if isinstance(params, str) else params
        return Prompt(record.row_index, [], job.params, error)

    def check(self, records: Sequence[Record]) -> list[tuple[RowError, bool] | None]:
        """For each row why it makes no text, and whether the reason lies in the column or the job's flags, so that
        other rows may share it. Nothing is tokenised: a row at which a tokeniser crashes does no harm here."""
        jobs = [_Row(record) for record in records]
        with self._chat.guarded():
            for job in jobs:
                self._compose(job)
        return [None if job.error is None else (job.error, job.of_column) for job in jobs]

    def prompt_text(self, record: Record) -> str | None:
        """The text that is tokenised for a record, to be shown; None for token ids and rows in error."""
        job = _Row(record)
        with self._chat.guarded():
            self._compose(job)
        return job.text if job.error is None else None

    # -- row to text

    def _compose(self, job: _Row) -> None:
        record = job.record
        if record.error is not None:
            job.error = record.error
            return
        fields = record.fields
        if self._source.params is not None:
            params = self._row_params(fields)
            if isinstance(params, str):
                job.error, job.of_column = self._located(job, "invalid_params", params), True
                return
            job.params = params
        try:
            self._form(job, fields)
        except forms.InvalidPrompt as error:
            job.error, job.of_column = self._located(job, "invalid_prompt", str(error)), error.of_column
        except RenderError as error:
            job.of_column = True
            job.error = self._located(job, "template_error", f"the chat template refused the row: {error}")
        except RenderTimeout:
            message = f"the chat template took longer than {self._config.render_seconds:g} s"
            job.error = self._located(job, "template_error", message)
        except MemoryError:
            job.error = self._located(job, "template_error", "the chat template needs too much memory")

    def _row_params(self, fields: Mapping[str, Any]) -> SamplingParams | str | None:
        try:
            return self._params.parse(look_up(fields, self._source.params or ""))
        except forms.InvalidPrompt as error:
            return str(error)

    def _form(self, job: _Row, fields: Mapping[str, Any]) -> None:
        kind, name = self._source.kind, self._source.columns[0]
        if kind == "any":
            name = self._pick(fields)
            kind = DEFAULTS[name]
        if kind == "token_ids":
            job.ids = forms.token_ids(name, look_up(fields, name), self._config.vocab_size)
            return
        if kind == "messages":
            messages = forms.messages(name, look_up(fields, name), self._config.system)
            job.text, job.special = self._chat.render(fields, messages), False
            return
        if kind == "text":
            text = forms.plain_text(name, look_up(fields, name))
        else:
            text = "".join(
                [forms.template_text(part, look_up(fields, part)) if column else part for column, part in self._parts]
            )
        if self._chat.wraps_text:
            job.text, job.special = self._chat.render(fields, self._chat.turns(text)), False
        else:
            job.text, job.special = text, True

    def _pick(self, fields: Mapping[str, Any]) -> str:
        """The one default column that the row fills."""
        filled = [name for name in self._source.columns if fields.get(name) is not None]
        if len(filled) == 1:
            return filled[0]
        if not filled:
            raise forms.InvalidPrompt(f"columns {' and '.join(map(repr, self._source.columns))} are null or absent")
        raise forms.InvalidPrompt(
            f"columns {' and '.join(map(repr, filled))} are both given; choose one with --prompt, --messages or "
            "--prompt-token-ids",
            of_column=True,
        )

    # -- text to tokens

    def _encode(self, jobs: list[_Row], special: bool) -> None:
        jobs = [job for job in jobs if self._fits_tokenizer(job)]
        if not jobs:
            return
        texts = [job.text or "" for job in jobs]
        try:
            encoded = self._tokenizer.encode_batch(texts, add_special_tokens=special)
        except Exception:  # one bad text must not cost the others
            encoded = []
            for job in jobs:
                encoded.append(self._encode_one(job, special))
        bos = self._added_bos if special else None
        for job, ids in zip(jobs, encoded, strict=True):
            if bos is not None and ids[:2] == [bos, bos]:
                ids = ids[1:]  # the text began with the start token's marker
            job.ids = ids

    def _encode_one(self, job: _Row, special: bool) -> list[int]:
        try:
            return self._tokenizer.encode(job.text or "", add_special_tokens=special)
        except Exception as error:
            reason = f"{error}" or type(error).__name__
            job.error = self._located(job, "invalid_encoding", f"the text cannot be tokenised: {reason}")
            return []

    def _fits_tokenizer(self, job: _Row) -> bool:
        """Keeps a text that is surely too long away from the tokenizer, which needs 150 bytes per character."""
        text = job.text or ""
        if len(text) <= self._max_chars:
            return True
        if self._config.length_policy == "error":
            least = len(text) // self._tokenizer.max_token_chars
            job.error = self._too_long(job, f"at least {least:,}")
            return False
        left = self._config.length_policy == "truncate-left"
        job.text = text[-self._max_chars :] if left else text[: self._max_chars]
        return True

    # -- tokens to prompt

    def _finish(self, job: _Row) -> Prompt:
        ids = job.ids
        if job.error is None and not ids:
            column = self._source.columns[0]
            job.error = self._located(job, "invalid_prompt", f"column {column!r} gives a prompt without any token")
        if job.error is None:
            limit = self._config.max_model_len
            if self._config.length_policy != "error":
                ids = self._cut(ids, job.params or self._config.sampling)
            elif len(ids) >= limit:
                job.error = self._too_long(job, f"{len(ids):,}")
        if job.error is not None:
            return Prompt(job.record.row_index, [], job.params, job.error)
        return Prompt(job.record.row_index, ids, job.params, None)

    def _cut(self, ids: list[int], params: SamplingParams) -> list[int]:
        """Leaves room for `max_tokens` (an eighth of the limit where that is not set), at most half of the limit.

        A start token stays in front when the start is cut.
        """
        limit = self._config.max_model_len
        keep = limit - max(1, min(params.max_tokens or limit // 8, limit // 2))
        if len(ids) <= keep:
            return ids
        if self._config.length_policy == "truncate-right":
            return ids[:keep]
        if ids[0] == self._tokenizer.bos_token_id and keep > 1:
            return [ids[0], *ids[1 - keep :]]
        return ids[-keep:]

    def _too_long(self, job: _Row, tokens: str) -> RowError:
        limit = self._config.max_model_len
        message = f"the prompt has {tokens} tokens and max_model_len is {limit:,}: no room for output"
        return self._located(job, "prompt_too_long", message)

    def _located(self, job: _Row, type: str, message: str) -> RowError:
        name = self._source.id
        where = job.record.where
        if name is not None:
            value = look_up_or_none(job.record.fields, name)
            if isinstance(value, str | int):
                where += f" ({name} {_shown(value)})"
        return RowError(type, f"{where}: {message}")


class _Row:
    """One row on its way through `build_many`."""

    __slots__ = ("error", "ids", "of_column", "params", "record", "special", "text")

    def __init__(self, record: Record) -> None:
        self.record = record
        self.text: str | None = None
        self.special = True
        self.ids: list[int] = []
        self.params: SamplingParams | None = None
        self.error: RowError | None = None
        self.of_column = False


def _shown(value: str | int) -> str:
    """A user's id in a message: printable and short."""
    text = "".join(char if char.isprintable() else "\ufffd" for char in str(value)[:60])
    return text + ("..." if len(str(value)) > 60 else "")
