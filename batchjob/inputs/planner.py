"""One streaming pass over the inputs makes the frozen plan: files, chunks, carried columns and their types."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from batchjob.errors import InputDataError
from batchjob.inputs.find import find_inputs
from batchjob.inputs.formats.base import FoundFile, Scan, ScanOptions
from batchjob.inputs.formats.table import FORMATS
from batchjob.inputs.stamps import stamp
from batchjob.inputs.walk import check_regular
from batchjob.plan import Chunk, InputFile, JobPlan
from batchjob.spec import JobSpec

MIN_CHUNK, MAX_CHUNK, MAX_PARTS = 64, 20_000, 10_000  # (row, sample) pairs, pairs, chunks


@dataclass(frozen=True, slots=True)
class PlanResult:
    """`columns`: every input column and its kind (as in JobPlan.columns), carried or not. Bad lines are rows too."""

    plan: JobPlan
    columns: Mapping[str, str]
    warnings: tuple[str, ...] = ()
    num_bad_rows: int = 0
    first_bad_row: str = ""
    null_columns: frozenset[str] = frozenset()  # columns known to be without one value, whatever their kind says


def chunk_size(num_rows: int, *, num_workers: int, samples: int) -> int:
    """Rows per chunk: rows / (64 x workers), clamped to 64 .. 20,000 (row, sample) pairs and to 10,000 parts."""
    wanted = -(-num_rows // (64 * max(num_workers, 1)))
    wanted = max(wanted, -(-MIN_CHUNK // samples))
    wanted = min(wanted, max(1, MAX_CHUNK // samples))
    return max(wanted, -(-num_rows // MAX_PARTS), 1)


def make_plan(spec: JobSpec, *, num_workers_hint: int = 1) -> PlanResult:
    """Plans the job's inputs. Deterministic in the inputs, `limit`, `keep_columns`, `n`, `chunk_rows` and the hint.

    Raises InputMissingError (66) and InputDataError (65: not our formats, types of Parquet files that differ, unknown
    --keep-columns, not one readable row).
    """
    found, warnings = find_inputs(spec.input, spec.output)
    return plan_files(spec, found, num_workers_hint=num_workers_hint, warnings=warnings)


def plan_files(
    spec: JobSpec,
    found: Sequence[FoundFile],
    *,
    num_workers_hint: int = 1,
    warnings: Sequence[str] = (),
    carried: Collection[str] | None = None,
) -> PlanResult:
    """`make_plan` for files that have been found already, all of one format. `carried`: the columns of a job that is
    there, in place of `keep_columns`."""
    samples = spec.n or 1
    step = spec.chunk_rows or max(1, MIN_CHUNK // samples)
    options = ScanOptions(step, is_step_fixed=spec.chunk_rows is not None, max_row_bytes=spec.max_row_bytes)
    scan = FORMATS[found[0].format].scan(found, options)
    files: list[InputFile] = []
    left = spec.limit
    for file in found:
        if left == 0 and files:
            break
        before = check_regular(file.path)
        count, how = scan.add(file, before.st_size, left)
        files.append(stamp(file, before, count, how))
        left = None if left is None else left - count
    scan.finish()
    num_rows = sum(file.num_rows for file in files)
    wanted = chunk_size(num_rows, num_workers=num_workers_hint, samples=samples)
    size = spec.chunk_rows or _align(wanted, scan.step, num_rows)
    if carried is None:
        kept = kept_columns(spec.keep_columns, scan.columns, num_rows=num_rows)
    else:
        kept = [name for name in scan.columns if name in carried]
    plan = JobPlan(
        files=tuple(files),
        chunks=tuple(_cut(files, size, scan)),
        columns={name: scan.columns[name] for name in kept},
        arrow_schema=scan.schema(kept).serialize().to_pybytes(),
    )
    return PlanResult(
        plan=plan,
        columns=scan.columns,
        warnings=(*warnings, *scan.warnings),
        num_bad_rows=scan.num_bad_rows,
        first_bad_row=scan.first_bad_row,
        null_columns=scan.null_columns,
    )


def _align(size: int, step: int, num_rows: int) -> int:
    """A multiple of `step`, below `size` where that does not make too many parts."""
    below = size // step * step
    return below if below and below * MAX_PARTS >= num_rows else below + step


def kept_columns(keep: str, columns: Mapping[str, str], *, num_rows: int) -> list[str]:
    """The carried columns that `--keep-columns` names, in the input's order."""
    if keep == "all":
        return list(columns)
    if keep == "none":
        return []
    wanted = [name.strip() for name in keep.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in columns]
    if unknown and num_rows > 0:
        known = ", ".join(columns) or "none"
        raise InputDataError(f"--keep-columns: no input row has a column {unknown[0]!r}; columns: {known}")
    return [name for name in columns if name in wanted]


def _cut(files: Sequence[InputFile], size: int, scan: Scan) -> list[Chunk]:
    starts = [0]
    for file in files:
        starts.append(starts[-1] + file.num_rows)
    chunks: list[Chunk] = []
    file_index = 0
    for row_index in range(0, starts[-1], size):
        stop = min(row_index + size, starts[-1])
        while starts[file_index + 1] <= row_index:
            file_index += 1
        segments = []
        at, row = file_index, row_index
        while row < stop:
            count = min(stop, starts[at + 1]) - row
            if count > 0:
                segments.append(scan.segment(at, row - starts[at], count, row))
            row += count
            at += 1
        chunks.append(Chunk(len(chunks), row_index, stop - row_index, tuple(segments)))
    return chunks


def shared_streams(plan: JobPlan, num_shards: int) -> list[str]:
    """Warnings about compressed files that several shards read: such a file cannot be entered in the middle."""
    readers: dict[int, set[int]] = {}
    for chunk in plan.chunks:
        for segment in chunk.segments:
            if plan.files[segment.file_index].compression:
                readers.setdefault(segment.file_index, set()).add(chunk.index % num_shards)
    shared = [(plan.files[index].path, len(shards)) for index, shards in readers.items() if len(shards) > 1]
    if not shared:
        return []
    path, num_readers = shared[0]
    more = f" (and {len(shared) - 1:,} more files like it)" if len(shared) > 1 else ""
    return [
        f"{path}{more} is compressed, so each of the {num_readers:,} shards that read it decompresses it from its "
        "start: store it uncompressed, as Parquet, or as many smaller files"
    ]
