"""Checks of state files before their content is used: they may be damaged, or another user's.

Names of output files are made of integers and fixed text, and a plan names input files that the job must also be given
as --input; so what is left to check are types, ranges, and that the chunks are what a planner makes.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from batchjob.plan import Chunk, InputFile, JobPlan, Segment

MAX_STATE_BYTES = 256 << 20  # of job.json
_KINDS = {"parquet", "int64", "double", "bool", "string", "json"}
_INT64 = 1 << 63


def check_plan(plan: JobPlan) -> None:
    """Raises ValueError unless the plan is one that a planner could have made."""
    for file in plan.files:
        _check_file(file)
    next_row = 0
    for index, chunk in enumerate(plan.chunks):
        if (chunk.index, chunk.row_index) != (index, next_row):
            raise ValueError(f"chunk {chunk.index} is not the one that follows row {next_row}")
        _check_chunk(chunk, plan.files)
        next_row += chunk.num_rows
    names = pa.ipc.read_schema(pa.BufferReader(plan.arrow_schema)).names if plan.arrow_schema else []
    if list(plan.columns) != names or not set(plan.columns.values()) <= _KINDS:
        raise ValueError("its columns are not those of its schema")


def _check_file(file: InputFile) -> None:
    if not all(isinstance(text, str) for text in (file.path, file.format, file.compression, file.digest)):
        raise ValueError("an input file is not described by text")
    if not file.path.startswith("/") or "\0" in file.path:
        raise ValueError(f"{file.path!r} is no absolute path")
    if not file.format or file.compression not in ("", "gz", "zst", "xz", "bz2"):  # the reader knows the formats
        raise ValueError(f"{file.path!r} has no known format")
    if not all(_is_count(number) for number in (file.size, file.num_rows)) or not all(
        type(time) is int for time in (file.mtime_ns, file.ctime_ns)
    ):
        raise ValueError(f"{file.path!r} has no sensible size")


def _check_chunk(chunk: Chunk, files: tuple[InputFile, ...]) -> None:
    if not _is_count(chunk.num_rows) or chunk.num_rows < 1:
        raise ValueError(f"chunk {chunk.index} has no rows")
    if sum(_segment_rows(segment, files) for segment in chunk.segments) != chunk.num_rows:
        raise ValueError(f"chunk {chunk.index} has not the rows of its segments")


def _segment_rows(segment: Segment, files: tuple[InputFile, ...]) -> int:
    numbers = (segment.file_index, segment.first_row, segment.num_rows, segment.byte_offset, segment.line)
    if not all(_is_count(number) for number in numbers) or segment.file_index >= len(files):
        raise ValueError("a chunk has a segment out of range")
    if not isinstance(segment.digest, str):
        raise ValueError("a segment's digest is no text")
    if segment.first_row + segment.num_rows > files[segment.file_index].num_rows:
        raise ValueError("a chunk has rows that its file has not")
    return segment.num_rows


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _INT64
