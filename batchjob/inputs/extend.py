"""New input files for a job that is there: planned as at first, then put behind its files and held against its columns.

The columns of a job and their types are fixed when it is made; what would not fit them is refused before a row runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

import pyarrow as pa

from batchjob.errors import InputDataError, InputMissingError
from batchjob.inputs.folders import is_of_folders
from batchjob.inputs.formats.base import FoundFile
from batchjob.inputs.formats.table import format_of
from batchjob.inputs.planner import PlanResult, plan_files
from batchjob.inputs.reader import InputReader
from batchjob.inputs.unify import is_certain, join
from batchjob.plan import Chunk, JobPlan
from batchjob.spec import JobSpec


def plan_extension(spec: JobSpec, plan: JobPlan, new: Sequence[FoundFile], *, num_workers_hint: int = 1) -> PlanResult:
    """Plans files that `plan` does not have. The result's chunks, rows and file numbers follow those of `plan`.

    Deterministic like `make_plan`. Raises InputMissingError and InputDataError; the latter also where a carried column
    has another type than in the job.
    """
    found = plan_files(replace(spec, limit=None), new, num_workers_hint=num_workers_hint, carried=plan.columns)
    names = ", ".join(file.path for file in found.plan.files[:3]) + (" ..." if len(found.plan.files) > 3 else "")
    _check_columns(plan, found, names, spec.max_row_bytes)
    num_files, num_chunks, num_rows = len(plan.files), len(plan.chunks), plan.num_rows
    chunks = tuple(
        Chunk(
            num_chunks + chunk.index,
            num_rows + chunk.row_index,
            chunk.num_rows,
            tuple(replace(segment, file_index=num_files + segment.file_index) for segment in chunk.segments),
        )
        for chunk in found.plan.chunks
    )
    return replace(
        found,
        plan=JobPlan(files=found.plan.files, chunks=chunks, columns=plan.columns, arrow_schema=plan.arrow_schema),
    )


def _check_columns(plan: JobPlan, found: PlanResult, names: str, max_row_bytes: int) -> None:
    """A carried column that the new files lack is null there; one of another type cannot be stored."""
    have = _schema(found.plan)
    for field in _schema(plan):
        kind = plan.columns[field.name]
        if field.name not in found.columns or field.name in found.null_columns or kind == "json":
            continue
        new_kind, new_type = found.columns[field.name], have.field(field.name).type
        if is_of_folders(field) and is_of_folders(have.field(field.name)) and pa.types.is_string(field.type):
            if not pa.types.is_string(
                have.field(field.name).type
            ):  # a folder's value is text first, a row's may not be
                _look_at_rows(plan, found, field, max_row_bytes)
            continue
        if new_kind != kind or join(field.type, new_type) != field.type:
            new_name = "of mixed or nested type" if new_kind == "json" else str(new_type)
            raise InputDataError(
                f"column {field.name!r} is {field.type} in this job but {new_name} in the new files ({names}). Convert "
                "it there, or run a new job with another --output."
            )
        if not is_certain(new_type, field.type):
            for file in found.plan.files:
                format_of(file).check_values(file.path, field.name, field.type, "run a new job with another --output")


def _look_at_rows(plan: JobPlan, found: PlanResult, field: pa.Field, max_row_bytes: int) -> None:
    """Reads one column of the new files as the job will. Raises InputDataError where a row has another type."""
    alone = replace(
        found.plan,
        columns={field.name: plan.columns[field.name]},
        arrow_schema=pa.schema([field]).serialize().to_pybytes(),
    )
    with closing(InputReader(alone, max_row_bytes=max_row_bytes)) as reader:
        for chunk in alone.chunks:
            try:
                reader.carried(chunk)
            except InputMissingError as error:
                path = alone.files[chunk.segments[0].file_index].path
                raise InputDataError(
                    f"column {field.name!r} is {field.type} in this job but not in all rows of the new files ({path} "
                    "...). Convert it there, or run a new job with another --output."
                ) from error


def _schema(plan: JobPlan) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(plan.arrow_schema))
