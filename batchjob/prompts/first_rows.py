"""A look at the first rows of a new job: an error that every row has is reported before a model is loaded.

A bad row never stops a job. A job is refused only where each row of the whole input has been looked at and fails, and
for a reason that lies in the column or in the flags.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from itertools import islice

from batchjob.errors import InputDataError
from batchjob.inputs.reader import InputReader
from batchjob.plan import JobPlan
from batchjob.prompts import PromptBuilder, PromptConfig
from batchjob.prompts.feeder import in_batches
from batchjob.prompts.paths import look_up_or_none
from batchjob.prompts.source import CHAT_COLUMNS
from batchjob.prompts.tokenizer import Tokenizer
from batchjob.records import Record, RowError
from batchjob.sampling import PARAM_NAMES

_ROWS = 100
_SECONDS = 10.0  # for looking on where all of the first rows fail


def check_first_rows(
    plan: JobPlan, config: PromptConfig, tokenizer: Tokenizer, columns: list[str], *, max_row_bytes: int
) -> list[str]:
    """Warnings about what the first rows show. `columns` are all of the input. Raises InputDataError, or UsageError as
    a PromptBuilder does, where not one row can be run."""
    builder = PromptBuilder(config, tokenizer)
    warnings = [*builder.warnings, *_unused_columns(config, columns)]
    failures: list[Failure] = []
    unused = _Unused(config, tokenizer)
    num_rows = 0
    until = time.monotonic() + _SECONDS  # a template may be so slow that looking costs as much as running
    with closing(InputReader(plan, max_row_bytes=max_row_bytes)) as reader:
        rows = (record for chunk in plan.chunks for record in reader.rows(chunk, config.source.read))
        for records in in_batches(islice(rows, _ROWS)):
            failures += [failure for failure in builder.check(records) if failure is not None]
            unused.look_at(records)
            num_rows += len(records)
            if time.monotonic() > until:
                break
        if failures and len(failures) == num_rows:
            warnings += _look_at_more_rows(builder, rows, failures, columns)
        elif failures:
            warnings.append(f"{len(failures)} of {_first(num_rows)} cannot be run: {failures[0][0].message}")
    return [*warnings, *unused.warnings()]


Failure = tuple[RowError, bool]


def _look_at_more_rows(
    builder: PromptBuilder, rows: Iterator[Record], failures: list[Failure], columns: list[str]
) -> list[str]:
    """Looks for a row that does not fail, after all of the first rows have."""
    until = time.monotonic() + _SECONDS
    number = len(failures)
    message = failures[0][0].message
    is_of_column = all(of_column for _, of_column in failures)
    is_over = False
    batches = in_batches(rows)
    while is_of_column and not is_over and time.monotonic() < until:
        records = next(batches, [])
        number += len(records)
        is_over = not records
        is_of_column = all(failure is not None and failure[1] for failure in builder.check(records))
    if is_over:
        listed = ", ".join(columns[:50])
        raise InputDataError(
            f"no row can be run, all {number:,} fail; the first: {message}{_remedy(failures[0][0])}. Columns: {listed}"
        )
    return [f"{_first(len(failures))} cannot be run: {message}{_remedy(failures[0][0])}"]


def _first(num_rows: int) -> str:
    return "the first row" if num_rows == 1 else f"the first {num_rows} rows"


def _remedy(error: RowError) -> str:
    if error.type == "invalid_params":
        return "; if the column holds something else, --params none leaves it alone"
    return ""


def _unused_columns(config: PromptConfig, columns: list[str]) -> list[str]:
    """Columns that are meant for a chat template, beside text that is sent without one."""
    source = config.source
    if source.chat_columns or config.chat or config.system is not None or source.kind in ("messages", "any"):
        return []
    found = [name for name in CHAT_COLUMNS if name in columns and name != "documents" and name not in source.columns]
    if not found:
        return []
    return [f"the input's {_named(found)} not used, since the prompt is sent without the chat template; --chat uses it"]


class _Unused:
    """Finds values that a chat template has no use for, and sampling settings beside messages in an object."""

    def __init__(self, config: PromptConfig, tokenizer: Tokenizer) -> None:
        self._source, self._tokenizer = config.source, tokenizer
        in_object = config.source.kind == "messages" and config.source.roots
        inside = config.source.columns[0].rpartition(".")[0] if in_object else ""
        self._inside = "" if inside == config.source.params else inside
        self._variables: dict[str, None] = {}
        self._settings: dict[str, None] = {}

    def look_at(self, records: list[Record]) -> None:
        for record in records:
            for path in self._source.chat_columns:
                name, value = path.rpartition(".")[2], look_up_or_none(record.fields, path)
                given: Iterable[str] = (name,) if name in ("tools", "documents") and value else ()
                if name == "chat_template_kwargs" and isinstance(value, dict):
                    given = value
                self._variables.update({key: None for key in given if not self._tokenizer.template_mentions(key)})
            item = look_up_or_none(record.fields, self._inside) if self._inside else None
            if isinstance(item, dict):
                self._settings.update({name: None for name in PARAM_NAMES if item.get(name) is not None})

    def warnings(self) -> list[str]:
        found = []
        if self._variables:
            found.append(f"the model's chat template has no use for the rows' {', '.join(self._variables)}")
        if self._settings:
            names = ", ".join(f"{self._inside}.{name}" for name in self._settings)
            found.append(f"the rows' {names} are not used: give them as flags, or in an object that --params names")
        return found


def _named(names: list[str]) -> str:
    return f"column {names[0]} is" if len(names) == 1 else f"columns {', '.join(names)} are"
