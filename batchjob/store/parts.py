"""Parts, the immutable Parquet files in OUT/data: how one is written under a temporary name, and how it is checked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchjob.errors import ConfigMismatchError
from batchjob.plan import Chunk
from batchjob.store.columns import OutputColumns
from batchjob.store.counts import RowCounts
from batchjob.store.fsops import FsOps, Sink

PART_VERSION = 1
_PREFIX = "batchjob."


class BadPartError(Exception):
    """A file that is no valid part of this job; the message says why."""


@dataclass(frozen=True, slots=True)
class PartInfo:
    """The footer of a part. `num_rows` are the chunk's input rows; `counts` are output rows."""

    job_id: str
    fingerprint: str
    chunk_index: int
    row_index: int
    num_rows: int
    counts: RowCounts
    content_hash: str  # of the generated columns, see ContentHash
    writer: str
    attempt: str

    def to_metadata(self) -> dict[str, str]:
        values: dict[str, Any] = {
            "part_version": PART_VERSION,
            "job_id": self.job_id,
            "fingerprint": self.fingerprint,
            "chunk": self.chunk_index,
            "row_index": self.row_index,
            "num_rows": self.num_rows,
            "counts": json.dumps(self.counts.to_json()),
            "content_hash": self.content_hash,
            "writer": self.writer,
            "attempt": self.attempt,
        }
        texts = {name: str(value) for name, value in values.items()}
        texts["digest"] = _digest(texts)
        return {_PREFIX + name: text for name, text in texts.items()}

    @classmethod
    def from_metadata(cls, metadata: Mapping[bytes, bytes]) -> PartInfo:
        """Raises BadPartError if keys are missing, not understood or damaged (Parquet has no checksum on them)."""
        texts: dict[str, str] = {}

        def get(name: str) -> str:
            return texts[name]

        try:
            for key, value in metadata.items():
                if key.startswith(_PREFIX.encode()):
                    texts[key.decode().removeprefix(_PREFIX)] = value.decode()
            if texts.pop("digest") != _digest(texts):
                raise BadPartError("its footer is damaged")
            if int(get("part_version")) > PART_VERSION:
                raise ConfigMismatchError(
                    f"a part was written in a newer format, by batchjob {get('writer')}. Use that version."
                )
            return cls(
                job_id=get("job_id"),
                fingerprint=get("fingerprint"),
                chunk_index=int(get("chunk")),
                row_index=int(get("row_index")),
                num_rows=int(get("num_rows")),
                counts=RowCounts.from_json(json.loads(get("counts"))),
                content_hash=get("content_hash"),
                writer=get("writer"),
                attempt=get("attempt"),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise BadPartError(f"its footer is not that of a part ({error!r})") from error


def _digest(texts: Mapping[str, str]) -> str:
    return hashlib.blake2b(json.dumps(sorted(texts.items())).encode(), digest_size=8).hexdigest()


class ContentHash:
    """BLAKE2b over the generated fields of the output rows in order, in the form of log records.

    It does not depend on how a Parquet writer lays out a file, so it can be checked against any copy of the rows.
    """

    def __init__(self, columns: OutputColumns) -> None:
        self._columns = columns
        self._hash = hashlib.blake2b(digest_size=16)

    def update(self, values: Mapping[str, list[Any]]) -> None:
        """Adds rows, given as lists of column values."""
        self._hash.update(self._columns.encode_rows(values))

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def write_part(
    fs: FsOps, path: Path, schema: pa.Schema, tables: Iterable[pa.Table], info: Callable[[], PartInfo]
) -> PartInfo:
    """Writes and fsyncs one part under a temporary name. `info` is asked after the last table.

    Each table becomes a row group, so memory is bounded by the largest. Raises OSError; the file is then garbage.
    """
    sink = Sink(fs, path)
    try:
        with pq.ParquetWriter(sink, schema, version="2.6", compression="zstd", write_page_checksum=True) as writer:
            for table in tables:
                if table.num_rows:
                    writer.write_table(table, row_group_size=table.num_rows)
            result = info()
            writer.add_key_value_metadata(result.to_metadata())
        size = sink.finish()
        if fs.stat(path).st_size != size:
            raise OSError(f"{path} has {fs.stat(path).st_size} bytes on disk, not the {size} written")
        return result
    finally:
        sink.abandon()


@contextmanager
def _damage_is_bad_part() -> Iterator[None]:
    """Turns the many errors of damaged files into BadPartError. pyarrow raises OSError for some damage too; only those
    of the file system have an errno."""
    try:
        yield
    except (pa.ArrowException, OSError, EOFError, ValueError, KeyError, TypeError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise BadPartError(f"it cannot be read ({error})") from error


def read_info(fs: FsOps, path: Path, schema: pa.Schema) -> PartInfo:
    """The footer of a part, checked against the file's own row count and columns. Raises BadPartError, or OSError."""
    with fs.open_read(path) as file, _damage_is_bad_part():
        metadata = pq.read_metadata(file)
        info = PartInfo.from_metadata(metadata.metadata or {})
        if metadata.num_rows != info.counts.num_rows:
            raise BadPartError(f"it has {metadata.num_rows} rows, its footer counts {info.counts.num_rows}")
        if not metadata.schema.to_arrow_schema().equals(schema):
            raise BadPartError("it does not have the columns of this job")
        low, high = _row_range(metadata)
        if low is not None and (low, high) != (info.row_index, info.row_index + info.num_rows - 1):
            raise BadPartError(f"it holds rows {low} to {high}, its footer says {info.row_index} and {info.num_rows}")
    return info


def _row_range(metadata: pq.FileMetaData) -> tuple[int | None, int | None]:
    """The smallest and largest row_index by the statistics of the row groups."""
    low: int | None = None
    high: int | None = None
    for i in range(metadata.num_row_groups):
        statistics = metadata.row_group(i).column(0).statistics
        if statistics is None or not statistics.has_min_max:
            return None, None
        low = statistics.min if low is None else min(low, statistics.min)
        high = statistics.max if high is None else max(high, statistics.max)
    return low, high


def check_expected(info: PartInfo, *, job_id: str, fingerprint: str, chunk: Chunk) -> None:
    """Raises BadPartError unless the footer is of this job and this chunk."""
    if info.job_id != job_id:
        raise BadPartError(f"it belongs to another job ({info.job_id})")
    if info.fingerprint != fingerprint:
        raise BadPartError("it was made with other settings")
    have = (info.chunk_index, info.row_index, info.num_rows)
    want = (chunk.index, chunk.row_index, chunk.num_rows)
    if have != want:
        raise BadPartError(f"it holds chunk {have[0]} with {have[2]} rows from {have[1]}, not chunk {want}")
    if info.counts.num_rows < chunk.num_rows:
        raise BadPartError(f"it has {info.counts.num_rows} rows for {chunk.num_rows} input rows")


def read_tables(fs: FsOps, path: Path, info: PartInfo) -> Iterator[pa.Table]:
    """The rows of a part, a row group at a time, with page checksums checked. Raises BadPartError at the end unless
    they were those that the footer promises: every row once, in order, with the hash of its generated columns.
    """
    counts = RowCounts()
    last = (info.row_index - 1, -1)
    with fs.open_read(path) as file:
        with _damage_is_bad_part():
            part = pq.ParquetFile(file, page_checksum_verification=True)
            columns = OutputColumns.of_schema(part.schema_arrow)
            content = ContentHash(columns)
        for group in range(part.num_row_groups):
            with _damage_is_bad_part():
                table = part.read_row_group(group)
                values = {column.name: table.column(column.name).to_pylist() for column in columns.columns}
                last = _follow(last, values["row_index"], values["sample_index"])
                count_rows(counts, values)
                content.update(values)
            yield table
    if last[0] != info.row_index + info.num_rows - 1 or counts != info.counts:
        raise BadPartError(f"it holds other rows than its footer counts: {counts.num_rows} of {info.counts.num_rows}")
    if content.hexdigest() != info.content_hash:
        raise BadPartError("its rows do not have the hash in its footer")


def _follow(last: tuple[int, int], rows: list[int], samples: list[int]) -> tuple[int, int]:
    """The last (row, sample), if each follows the one before without gap or repeat. Raises BadPartError."""
    for row, sample in zip(rows, samples, strict=True):
        if not ((row == last[0] and sample == last[1] + 1) or (row == last[0] + 1 and sample == 0)):
            raise BadPartError(f"row {row}, sample {sample} comes after row {last[0]}, sample {last[1]}")
        last = (row, sample)
    return last


def count_rows(counts: RowCounts, columns: Mapping[str, list[Any]]) -> None:
    """Adds rows, given as lists of column values."""
    for kind, prompt, output in zip(
        columns["error_type"], columns["num_prompt_tokens"], columns["num_output_tokens"], strict=True
    ):
        counts.add_row(kind, prompt, output)
