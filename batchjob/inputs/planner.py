"""One streaming pass over the inputs makes the frozen plan: files, chunks, carried columns and their types.

The pass holds a sparse index of line positions, at most 131,072 entries however many rows there are.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from batchjob.errors import InputDataError, InputMissingError
from batchjob.inputs.columns import FOLDER_MARK, column_names, unify_schemas
from batchjob.inputs.digests import MASK, row_digest
from batchjob.inputs.find import digest, find_inputs
from batchjob.inputs.formats import jsonl, parquet
from batchjob.inputs.formats.detect import FoundFile
from batchjob.inputs.formats.parquet_footers import check_footers
from batchjob.inputs.names import partition_kinds
from batchjob.inputs.streams import iter_lines
from batchjob.inputs.walk import check_regular
from batchjob.plan import Chunk, InputFile, JobPlan, Segment
from batchjob.records import RowError
from batchjob.spec import JobSpec

MIN_CHUNK, MAX_CHUNK, MAX_PARTS = 64, 20_000, 10_000  # (row, sample) pairs, pairs, chunks
_MAX_INDEX = 1 << 17
_MAX_HASHED = 4 << 30  # bytes of Parquet that are hashed whole, at 0.6 GB/s with reading; of what comes behind, samples
_ARROW = {"int64": pa.int64(), "double": pa.float64(), "bool": pa.bool_(), "string": pa.string(), "json": pa.string()}


@dataclass(frozen=True, slots=True)
class PlanResult:
    """`columns`: every input column and its kind (as in JobPlan.columns), carried or not. Bad lines are rows too."""

    plan: JobPlan
    columns: Mapping[str, str]
    warnings: tuple[str, ...] = ()
    num_bad_rows: int = 0
    first_bad_row: str = ""
    null_columns: frozenset[str] = frozenset()  # JSONL columns without one value, whatever their kind says


@dataclass(slots=True)
class _Scan:
    """What the pass over all inputs finds. `points` are (file, row in file, byte offset, line) of chunk starts."""

    files: list[InputFile]
    columns: dict[str, str]
    schemas: list[tuple[str, pa.Schema]]  # of Parquet files, by path
    index: _Index | None
    warnings: list[str]
    num_bad_rows: int = 0
    first_bad_row: str = ""
    null_columns: frozenset[str] = frozenset()


def chunk_size(num_rows: int, *, num_workers: int, samples: int) -> int:
    """Rows per chunk: rows / (64 x workers), clamped to 64 .. 20,000 (row, sample) pairs and to 10,000 parts."""
    wanted = -(-num_rows // (64 * max(num_workers, 1)))
    wanted = max(wanted, -(-MIN_CHUNK // samples))
    wanted = min(wanted, max(1, MAX_CHUNK // samples))
    return max(wanted, -(-num_rows // MAX_PARTS), 1)


class _Index:
    """Positions of every `step`-th row over all files. Doubles `step` when it is full, unless that is fixed."""

    def __init__(self, step: int, *, fixed: bool) -> None:
        self.step, self._fixed = step, fixed
        self._offsets, self._lines = array("q"), array("q")
        self._sums: list[int] = []
        self.bounds: dict[int, int] = {}  # where files begin and end -> sum of the digests of all rows before

    def add(self, offset: int, line: int, digests: int) -> None:
        """For rows 0, step, 2 x step, ... in turn. `digests` is the sum of the digests of all rows before."""
        self._sums.append(digests)
        self._offsets.append(offset)
        self._lines.append(line)

    def compact(self) -> None:
        if len(self._offsets) >= _MAX_INDEX and not self._fixed:
            self._offsets, self._lines, self._sums = self._offsets[::2], self._lines[::2], self._sums[::2]
            self.step *= 2

    def position(self, row_index: int) -> tuple[int, int]:
        return self._offsets[row_index // self.step], self._lines[row_index // self.step]

    def digest(self, first: int, stop: int) -> str:
        """Of the rows between two points or ends of files."""
        return f"{self._sum(stop) - self._sum(first) & MASK:032x}"

    def _sum(self, row_index: int) -> int:
        known = self.bounds.get(row_index)
        return self._sums[row_index // self.step] if known is None else known


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
    if found[0].format == "parquet":
        scan = _scan_parquet(found, spec.limit)
    else:
        step = spec.chunk_rows or max(1, MIN_CHUNK // samples)
        scan = _scan_jsonl(found, spec.limit, _Index(step, fixed=spec.chunk_rows is not None), spec.max_row_bytes)
    num_rows = sum(file.num_rows for file in scan.files)
    size = spec.chunk_rows or chunk_size(num_rows, num_workers=num_workers_hint, samples=samples)
    if scan.index is not None:
        size = _align(size, scan.index.step, num_rows)
    if carried is None:
        kept = kept_columns(spec.keep_columns, scan.columns, num_rows=num_rows)
    else:
        kept = [name for name in scan.columns if name in carried]
    schema = unify_schemas(scan.schemas, kept) if scan.schemas else _jsonl_schema(scan, kept)
    plan = JobPlan(
        files=tuple(scan.files),
        chunks=tuple(_cut(scan.files, size, scan.index)),
        columns={name: scan.columns[name] for name in kept},
        arrow_schema=schema.serialize().to_pybytes(),
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


def _cut(files: Sequence[InputFile], size: int, index: _Index | None) -> list[Chunk]:
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
                first = row - starts[at]
                offset, line = index.position(row) if index is not None and row == row_index and first else (0, 1)
                content = "" if index is None else index.digest(row, row + count)
                segments.append(Segment(at, first, count, offset, line, content))
            row += count
            at += 1
        chunks.append(Chunk(len(chunks), row_index, stop - row_index, tuple(segments)))
    return chunks


def _stamp(found: FoundFile, before: os.stat_result, num_rows: int, how: str) -> InputFile:
    """The file as it was before it was read. Raises InputMissingError if it changed meanwhile."""
    stat = check_regular(found.path)
    if (stat.st_size, stat.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
        raise InputMissingError(f"{found.path} changed while it was being planned; run again when it is complete")
    return InputFile(
        path=found.path,
        format=found.format,
        compression=found.compression,
        size=stat.st_size,
        mtime_ns=stat.st_mtime_ns,
        num_rows=num_rows,
        digest=digest(found.path, how),
        ctime_ns=stat.st_ctime_ns,
    )


def _scan_parquet(found: Sequence[FoundFile], limit: int | None) -> _Scan:
    files: list[InputFile] = []
    schemas: list[tuple[str, pa.Schema]] = []
    warnings: list[str] = []
    left, hashed = limit, 0
    check_footers([item.path for item in found])
    for item in found:
        if left == 0 and files:
            break
        before = check_regular(item.path)
        file = parquet.open_parquet(item.path)
        schemas.append((item.path, file.schema_arrow))
        metadata = file.metadata
        count = metadata.num_rows if left is None else min(left, metadata.num_rows)
        left = None if left is None else left - count
        largest = max((metadata.row_group(g).total_byte_size for g in range(metadata.num_row_groups)), default=0)
        if largest > 1 << 30:
            size = f"{largest / (1 << 30):.1f} GiB"
            warnings.append(f"{item.path} has a row group of {size}; resuming inside it decodes its start again")
        file.close()
        hashed += before.st_size
        files.append(_stamp(item, before, count, "sha256" if hashed <= _MAX_HASHED else "samples"))
    return _Scan(files, dict.fromkeys(column_names(schemas), "parquet"), schemas, None, warnings)


def _scan_jsonl(found: Sequence[FoundFile], limit: int | None, index: _Index, max_row_bytes: int) -> _Scan:
    types = jsonl.ColumnTypes()
    scan = _Scan([], {}, [], index, [])
    empty: list[str] = []
    total = digests = 0
    next_point = 0
    for item in found:
        if limit is not None and total >= limit and scan.files:
            break
        before = check_regular(item.path)
        first = total
        index.bounds[total] = digests
        good = 0
        first_bad = ""
        whole = True
        for offset, line, raw in iter_lines(item.path, item.compression, max_line_bytes=max_row_bytes):
            if total == limit:
                whole = False
                break
            if total == next_point:
                index.add(offset, line, digests)
                index.compact()
                next_point = total + index.step - total % index.step
            row, error = (None, raw) if isinstance(raw, RowError) else jsonl.parse_row(raw)
            if row is not None:
                good += 1
                types.add(row)
                if len(types) > jsonl.MAX_COLUMNS:
                    raise InputDataError(
                        f"{item.path}:{line}: the rows have more than {jsonl.MAX_COLUMNS} different keys; "
                        "put varying keys into one object"
                    )
            if error is not None:
                scan.num_bad_rows += 1
                first_bad = first_bad or f"{item.path}:{line}: {error.message}"
                scan.first_bad_row = scan.first_bad_row or first_bad
                if error.type == "input_damaged":
                    scan.warnings.append(f"{item.path}:{line}: {error.message}")
                if row is None and total == first and isinstance(raw, bytes):
                    _refuse_json_document(item.path, raw)
            digests = digests + row_digest(total - first, raw) & MASK
            total += 1
        if total > first and not good and (whole or not len(types)):
            raise InputDataError(
                f"{item.path}: not one of its {total - first:,} rows is a JSON object; first: {first_bad}. batchjob "
                "reads JSON Lines: one object per line. Convert the file, or leave it out"
            )
        if total == first and whole:
            empty.append(item.path)
        scan.files.append(_stamp(item, before, total - first, "sha256" if whole else "ends"))
    index.bounds[total] = digests
    if empty and len(found) > 1:
        number = f"{len(empty):,} input files hold" if len(empty) > 1 else "1 input file holds"
        scan.warnings.append(f"{number} no rows: {empty[0]}" + " ..." * (len(empty) > 1))
    if len(types):
        _add_folders(types, scan.files)
    scan.columns = types.kinds()
    scan.null_columns = types.only_null()
    return scan


def _add_folders(types: jsonl.ColumnTypes, files: Sequence[InputFile]) -> None:
    """The columns that folders give. One that rows have too keeps its type if that can hold what the folders say."""
    kinds, empty = types.kinds(), types.only_null()
    for name, kind in partition_kinds(file.path for file in files).items():
        known = None if name in empty else kinds.get(name)
        if known is None or known not in (kind, "string"):
            types.add({name: 0 if kind == "int64" else ""})


def _jsonl_schema(scan: _Scan, kept: Sequence[str]) -> pa.Schema:
    folders = partition_kinds(file.path for file in scan.files)
    return pa.schema(
        [pa.field(name, _ARROW[scan.columns[name]], metadata=FOLDER_MARK if name in folders else None) for name in kept]
    )


def _refuse_json_document(path: str, first_line: bytes) -> None:
    """A file that holds one document over many lines is known by its first line, and refused with what to do."""
    text = first_line.strip()
    if text in (b"{", b"["):
        what = "an indented JSON object" if text == b"{" else "a JSON array"
        how = "jq -c ." if text == b"{" else "jq -c '.[]'"
        raise InputDataError(f"{path} is {what}, not JSON Lines; convert it with: {how} FILE > FILE.jsonl")
    if text.startswith(b"[{") and text.endswith(b"}]"):
        raise InputDataError(f"{path} is a JSON array, not JSON Lines; convert it with: jq -c '.[]' FILE > FILE.jsonl")
