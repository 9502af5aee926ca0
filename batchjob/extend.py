"""The input of a job that is there: what was planned must be unchanged, and `--extend` adds what is new."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from batchjob.errors import InputDataError, InputMissingError, UsageError
from batchjob.plan import Plan
from batchjob.progress import counted, duration
from batchjob.prompts.source import PromptSource, resolve_prompt
from batchjob.spec import JobSpec

if TYPE_CHECKING:
    from batchjob.io.formats import FoundFile
    from batchjob.io.planner import PlanResult
    from batchjob.store.store import Store

Echo = Callable[[str], None]


def find_new_inputs(spec: JobSpec, plan: Plan, echo: Echo) -> list[FoundFile]:
    """The files of `--input` that the plan does not have: none, unless the job is to be extended.

    Raises InputMissingError where a planned file is gone, changed, or not in `--input`.
    """
    from batchjob.io.inputs import check_unchanged, find_inputs

    found, warnings = find_inputs(spec.input, spec.output)
    for line in warnings:
        echo(f"warning: {line}")
    planned = [file.path for file in plan.files]
    if spec.limit is not None:
        found = found[: len(planned)]  # files past the limit are not part of the job
    paths = [file.path for file in found]
    if gone := sorted(set(planned).difference(paths)):
        raise InputMissingError(f"input file {gone[0]} is part of this job but not of --input: add it")
    known = set(planned)
    new = [file for file in found if file.path not in known]
    if new and not spec.extend:
        raise InputMissingError(
            f"input file {new[0].path} was not there when this job was planned: --extend adds it to the job; or give "
            "another --output, or leave it out"
        )
    if not plan.num_extensions and [path for path in paths if path in known] != planned:
        raise InputMissingError("the input files come in another order than planned; give --input in the old order")
    for file in plan.files:
        if warning := check_unchanged(file):
            echo(f"warning: {warning}")
    return new


def extend(spec: JobSpec, store: Store, source: PromptSource | None, echo: Echo) -> None:
    """Appends what is new in `--input` to the plan. Of several processes that do so at once, one does it for all.

    Raises InputDataError where the new files do not fit the job's columns or prompts.
    """
    from batchjob.io.extension import plan_extension

    if source is None:
        raise UsageError(
            f"{store.output} holds a job without rows, whose columns are unknown: remove it, or give another --output"
        )
    while new := find_new_inputs(spec, store.plan, lambda line: None):
        started = time.monotonic()
        planned = plan_extension(spec, store.plan, new, num_workers_hint=spec.num_shards)
        if planned.plan.num_rows:
            _check_prompts(spec, source, planned, store.manifest.resolved["columns"], new)
        if not store.extend(planned.plan):
            continue
        for warning in planned.warnings:
            echo(f"warning: {warning}")
        if planned.num_bad_rows:
            echo(
                f"warning: {planned.num_bad_rows:,} rows cannot be read and become row errors: {planned.first_bad_row}"
            )
        if dropped := _dropped(spec, planned, store.manifest.resolved["columns"]):
            echo(f"warning: the columns of this job are fixed; the new files' {', '.join(dropped)} are left out")
        plan, seconds = planned.plan, duration(time.monotonic() - started)
        echo(
            f"added {counted(plan.num_rows, 'row')} of {counted(len(plan.files), 'new file')} in "
            f"{counted(len(plan.chunks), 'chunk')} ({seconds})"
        )


def _check_prompts(
    spec: JobSpec, source: PromptSource, planned: PlanResult, columns: Sequence[str], new: Sequence[FoundFile]
) -> None:
    """The new files must make their prompts from the same columns, and nothing in them may be passed over."""
    missing = [name for name in source.columns if name not in planned.columns]
    if missing if source.kind != "any" else len(missing) == len(source.columns):
        raise InputDataError(
            f"the new files ({new[0].path} ...) have no column {missing[0]!r}, which makes the prompts"
        )
    wanted = resolve_prompt(spec, [*columns, *(name for name in planned.columns if name not in columns)])
    if replace(wanted, id=source.id) != source:
        other = sorted({*wanted.columns, wanted.params or ""} - {*source.columns, source.params or ""})
        raise InputDataError(
            f"the new files ({new[0].path} ...) have a column {other[0]!r}, which the job's first files did not have "
            "and which would change what runs. Rename it there, or run a new job with another --output."
        )


def _dropped(spec: JobSpec, planned: PlanResult, columns: Sequence[str]) -> list[str]:
    return [name for name in planned.columns if name not in columns] if spec.keep_columns == "all" else []
