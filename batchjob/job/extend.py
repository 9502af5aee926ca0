"""The input of a job that is resumed: planned files must be unchanged, and `--extend` adds new ones."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from batchjob.errors import InputDataError, InputMissingError, UsageError
from batchjob.plan import InputFile, JobPlan
from batchjob.prompts.source import PromptSource, resolve_prompt
from batchjob.report.progress import counted, duration
from batchjob.spec import JobSpec

if TYPE_CHECKING:
    from batchjob.inputs.formats.base import FoundFile
    from batchjob.inputs.planner import PlanResult
    from batchjob.store.store import Store

Echo = Callable[[str], None]


def find_new_inputs(spec: JobSpec, plan: JobPlan, echo: Echo) -> tuple[list[FoundFile], JobPlan]:
    """Returns the files of `--input` that the plan does not have (only with --extend), and the plan, with
    the paths and times that its files have now.

    Raises InputMissingError where a planned file is gone, changed, or not in `--input`.
    """
    from batchjob.inputs.find import find_inputs
    from batchjob.inputs.formats.table import format_of
    from batchjob.inputs.stamps import check_size

    found, warnings = find_inputs(spec.input, spec.output)
    for line in warnings:
        echo(f"warning: {line}")
    given = plan
    plan = _follow_moved_files(plan, found, echo, spec.max_row_bytes)
    planned = [file.path for file in plan.files]
    if spec.limit is not None:
        found = found[: len(planned)]  # files past the limit are not part of the job
    paths = [file.path for file in found]
    again = _second_names(planned, paths)
    if gone := sorted(set(planned).difference(paths, again)):
        raise InputMissingError(
            f"input file {gone[0]} is part of this job but not of --input: add it. A file that was moved "
            "may be given by its new path, as long as it holds the same bytes"
        )
    known = set(planned)
    new = [file for file in found if file.path not in known]
    if new and not spec.extend:
        raise InputMissingError(
            f"input file {new[0].path} was not there when this job was planned: --extend adds it to the job; or give "
            "another --output, or leave it out"
        )
    if (
        plan == given
        and not plan.num_extensions
        and [path for path in paths if path in known] != [path for path in planned if path not in again]
    ):
        raise InputMissingError("the input files come in another order than planned; give --input in the old order")
    files = []
    for index, file in enumerate(plan.files):
        format_of(file)  # a plan may be damaged, or of a later version
        stat = check_size(file)
        if warning := _change_warning(plan, index, file, spec.max_row_bytes):
            echo(f"warning: {warning}")
        # Compared now, so what reads the rows later need not do so again unless the times change once more.
        files.append(replace(file, mtime_ns=stat.st_mtime_ns, ctime_ns=stat.st_ctime_ns))
    return new, replace(plan, files=tuple(files))


def _second_names(planned: Sequence[str], paths: Sequence[str]) -> set[str]:
    """Returns planned paths that are other names of files in `paths`: earlier versions read such files twice."""
    missing = [path for path in set(planned).difference(paths) if os.path.exists(path)]
    if not missing:
        return set()
    there = {(found.st_dev, found.st_ino) for found in map(os.stat, paths)}
    return {path for path in missing if ((found := os.stat(path)).st_dev, found.st_ino) in there}


def _change_warning(plan: JobPlan, index: int, file: InputFile, max_row_bytes: int) -> str | None:
    """As `check_unchanged`, which knows the ends of a JSONL file that is not read whole; its rows are compared here."""
    from batchjob.inputs.reader import InputReader
    from batchjob.inputs.stamps import check_unchanged

    warning = check_unchanged(file)
    if warning is None or not _has_lines(plan, index):
        return warning
    with closing(InputReader(plan, max_row_bytes=max_row_bytes)) as reader:
        reader.compare(plan.chunks, index)
    return f"{file.path} has a new modification time but the same content, as far as this job reads it"


def _has_lines(plan: JobPlan, index: int) -> bool:
    """Returns True if rows of a file have digests that say more than the file's own."""
    return plan.files[index].digest.startswith("ends:") and any(
        segment.digest for chunk in plan.chunks for segment in chunk.segments if segment.file_index == index
    )


def _follow_moved_files(plan: JobPlan, found: Sequence[FoundFile], echo: Echo, max_row_bytes: int) -> JobPlan:
    """Returns the plan with new paths for files that are given by another one: the same file, or the same bytes."""
    given = {file.path for file in found}
    gone = [index for index, file in enumerate(plan.files) if file.path not in given]
    if not gone:
        return plan
    planned = {file.path for file in plan.files}
    free: dict[int, dict[str, None]] = {}  # size -> paths
    for path in given - planned:
        free.setdefault(os.path.getsize(path), {})[path] = None
    files = list(plan.files)
    known: dict[tuple[str, str], str] = {}
    lines: list[str] = []
    for index in gone:
        file = files[index]
        name = os.path.basename(file.path)
        candidates = free.get(file.size, {})
        for path in sorted(candidates, key=lambda path: (os.path.basename(path) != name, path)):
            moved = _moved_file(plan, index, path, known, max_row_bytes)
            if moved is not None:
                lines.append(f"{path} is read in place of {file.path}: it holds the same")
                files[index] = moved
                del candidates[path]
                break
    if lines:
        more = f" (and {counted(len(lines) - 1, 'file')} more like it)" if len(lines) > 1 else ""
        echo(f"warning: {lines[0]}{more}")
    return replace(plan, files=tuple(files))


def _moved_file(
    plan: JobPlan, index: int, path: str, known: dict[tuple[str, str], str], max_row_bytes: int
) -> InputFile | None:
    """Returns the planned file at another path, if that holds the same bytes. `known` keeps digests of paths."""
    from batchjob.inputs.folders import partition_values
    from batchjob.inputs.reader import InputReader
    from batchjob.inputs.stamps import WHOLE, digest

    file = plan.files[index]
    if partition_values(path) != partition_values(file.path):
        return None  # folders such as lang=de are part of the rows
    moved = replace(file, path=path)
    if os.path.exists(file.path) and os.path.samefile(file.path, path):
        return moved  # whether it has changed is looked at like for any other
    how = file.digest.partition(":")[0]
    if how not in WHOLE and not _has_lines(plan, index):
        return None  # too little is known of it
    if (path, how) not in known:
        known[path, how] = digest(path, how)
    if known[path, how] != file.digest:
        return None
    if how == "ends":
        elsewhere = replace(plan, files=(*plan.files[:index], moved, *plan.files[index + 1 :]))
        with closing(InputReader(elsewhere, max_row_bytes=max_row_bytes)) as reader:
            try:
                reader.compare(plan.chunks, index)
            except InputMissingError:
                return None
    stat = os.stat(path)
    return replace(moved, mtime_ns=stat.st_mtime_ns, ctime_ns=stat.st_ctime_ns)


def extend(spec: JobSpec, store: Store, source: PromptSource | None, echo: Echo) -> None:
    """Appends the new files of `--input` to the plan. Of several processes that do so at once, one does it for all.

    Raises InputDataError where the new files do not fit the job's columns or prompts.
    """
    from batchjob.inputs.extend import plan_extension
    from batchjob.inputs.formats.table import FORMATS

    if source is None:
        raise UsageError(
            f"{store.output} holds a job without rows, whose columns are unknown: remove it, or give another --output"
        )
    while new := find_new_inputs(spec, store.plan, lambda line: None)[0]:
        started = time.monotonic()
        for file in new:
            if FORMATS[file.format].job_id(file.path) == store.manifest.job_id:
                raise InputDataError(f"{file.path} is a copy of answers of this very job: leave it out of --input")
        planned = plan_extension(spec, store.plan, new, num_workers_hint=spec.num_shards)
        if planned.plan.num_rows:
            _check_prompts(spec, source, planned, store.manifest.resolved["columns"], new)
        if not store.extend(planned.plan):
            continue
        echo_warnings(planned, echo)
        if dropped := _dropped_columns(spec, planned, store.manifest.resolved["columns"]):
            echo(f"warning: the columns of this job are fixed; the new files' {', '.join(dropped)} are left out")
        plan, seconds = planned.plan, duration(time.monotonic() - started)
        echo(
            f"added {counted(plan.num_rows, 'row')} of {counted(len(plan.files), 'new file')} in "
            f"{counted(len(plan.chunks), 'chunk')} ({seconds})"
        )


def echo_warnings(planned: PlanResult, echo: Echo) -> None:
    """Prints the warnings of a plan, and how many of its rows cannot be read."""
    for warning in planned.warnings:
        echo(f"warning: {warning}")
    if planned.num_bad_rows:
        echo(f"warning: {planned.num_bad_rows:,} rows cannot be read and become row errors: {planned.first_bad_row}")


def _check_prompts(
    spec: JobSpec, source: PromptSource, planned: PlanResult, columns: Sequence[str], new: Sequence[FoundFile]
) -> None:
    """Refuses new files with prompts from other columns, or with columns that the job would pass over."""
    missing = [name for name in source.columns if source.roots.get(name, name) not in planned.columns]
    if missing if source.kind != "any" else len(missing) == len(source.columns):
        raise InputDataError(
            f"the new files ({new[0].path} ...) have no column {missing[0]!r}, which makes the prompts"
        )
    wanted = resolve_prompt(spec, [*columns, *(name for name in planned.columns if name not in columns)])
    if replace(wanted, id=source.id) != source:
        other = sorted({*wanted.read} - {*source.read, wanted.id})
        raise InputDataError(
            f"the new files ({new[0].path} ...) have a column {other[0]!r}, which the job's first files did not have "
            "and which would change what runs. Rename it there, or run a new job with another --output."
        )


def _dropped_columns(spec: JobSpec, planned: PlanResult, columns: Sequence[str]) -> list[str]:
    return [name for name in planned.columns if name not in columns] if spec.keep_columns == "all" else []
