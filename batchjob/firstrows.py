"""A look at the first rows of a new job: what every row must fail of is told before a model is loaded.

A bad row never stops a job. A job is refused only where each row of the whole input has been looked at and fails, and
for a reason that lies in the column or in the flags.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from itertools import islice

from batchjob.errors import InputDataError
from batchjob.io.reader import InputReader
from batchjob.plan import Plan
from batchjob.progress import counted
from batchjob.prompts import PromptBuilder, PromptConfig
from batchjob.prompts.paths import look_up_or_none
from batchjob.prompts.source import CHAT_COLUMNS
from batchjob.records import Record, RowError
from batchjob.sampling import PARAM_NAMES
from batchjob.tokenizer import Tokenizer

_ROWS = 100
_SECONDS = 10.0  # for looking on where all of the first rows fail


def check_first_rows(
    plan: Plan, config: PromptConfig, tokenizer: Tokenizer, columns: list[str], *, max_row_bytes: int
) -> list[str]:
    """Warnings about what the first rows show. `columns` are all of the input. Raises InputDataError, or UsageError as
    a PromptBuilder does, where not one row can be run."""
    builder = PromptBuilder(config, tokenizer)
    warnings = [*builder.warnings, *_unused_columns(config, columns)]
    with closing(InputReader(plan, max_row_bytes=max_row_bytes)) as reader:
        rows = (record for chunk in plan.chunks for record in reader.rows(chunk, config.source.read))
        first = list(islice(rows, _ROWS))
        failures = _failures(builder, first)
        if first and len(failures) == len(first):
            warnings += _look_on(builder, rows, failures, columns)
        elif failures:
            count = f"{len(failures)} of the first {counted(len(first), 'row')}"
            warnings.append(f"{count} cannot be run: {failures[0][0].message}")
    warnings += _unused_variables(config, tokenizer, first)
    return warnings


Failure = tuple[RowError, bool]


def _failures(builder: PromptBuilder, records: list[Record]) -> list[Failure]:
    """Stops early where a template is so slow that looking would cost as much as running."""
    until = time.monotonic() + _SECONDS
    found: list[Failure] = []
    for at in range(0, len(records), 10):
        found += [failure for failure in builder.check(records[at : at + 10]) if failure is not None]
        if time.monotonic() > until:
            break
    return found


def _look_on(builder: PromptBuilder, rows: Iterator[Record], failures: list[Failure], columns: list[str]) -> list[str]:
    """All of the first rows fail: is there any row that does not?"""
    until = time.monotonic() + _SECONDS
    number = len(failures)
    message = failures[0][0].message
    is_of_column = all(of_column for _, of_column in failures)
    while is_of_column and time.monotonic() < until:
        records = list(islice(rows, _ROWS))
        if not records:
            listed = ", ".join(columns[:50])
            raise InputDataError(
                f"no row can be run, all {number:,} fail; the first: {message}{_remedy(failures[0][0])}. "
                f"Columns: {listed}"
            )
        found = builder.check(records)
        number += len(records)
        if None in found:
            break
        is_of_column = all(failure is not None and failure[1] for failure in found)
    return [f"the first {counted(len(failures), 'row')} cannot be run: {message}{_remedy(failures[0][0])}"]


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


def _unused_variables(config: PromptConfig, tokenizer: Tokenizer, records: list[Record]) -> list[str]:
    """What rows give to a chat template that has no use for it, and sampling settings beside messages in an object."""
    source = config.source
    given: dict[str, None] = {}
    for path in source.chat_columns:
        name = path.rpartition(".")[2]
        for record in records:
            value = look_up_or_none(record.fields, path)
            if name == "chat_template_kwargs" and isinstance(value, dict):
                given.update({key: None for key in value if not tokenizer.template_mentions(key)})
            elif name in ("tools", "documents") and value and not tokenizer.template_mentions(name):
                given[name] = None
    warnings = [f"the model's chat template has no use for the rows' {', '.join(given)}"] if given else []
    inside = source.columns[0].rpartition(".")[0] if source.kind == "messages" and source.roots else ""
    if inside and inside != source.params:
        objects = [look_up_or_none(record.fields, inside) for record in records]
        settings = [name for name in PARAM_NAMES if any(isinstance(item, dict) and name in item for item in objects)]
        if settings:
            names = ", ".join(f"{inside}.{name}" for name in settings)
            warnings.append(f"the rows' {names} are not used: give them as flags, or in an object that --params names")
    return warnings


def _named(names: list[str]) -> str:
    return f"column {names[0]} is" if len(names) == 1 else f"columns {', '.join(names)} are"
