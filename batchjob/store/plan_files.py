"""A `JobPlan` as an Arrow IPC file: one row per chunk; input files, columns and the schema in the metadata.

An extension of a job is such a file too, with its new files and chunks only. job.json, which is never written again,
cannot hold its checksum: it holds its own, over its content and the checksum of the plan file before it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace

import pyarrow as pa

from batchjob.plan import Chunk, InputFile, JobPlan, Segment

_SEGMENT = pa.struct(
    [
        pa.field("file_index", pa.int64(), nullable=False),
        pa.field("first_row", pa.int64(), nullable=False),
        pa.field("num_rows", pa.int64(), nullable=False),
        pa.field("byte_offset", pa.int64(), nullable=False),
        pa.field("line", pa.int64(), nullable=False),
    ]
)
_CHUNKS = pa.schema(
    [
        pa.field("index", pa.int64(), nullable=False),
        pa.field("row_index", pa.int64(), nullable=False),
        pa.field("num_rows", pa.int64(), nullable=False),
        pa.field("segments", pa.list_(_SEGMENT), nullable=False),
    ]
)


def plan_to_bytes(plan: JobPlan, *, previous: str = "") -> bytes:
    """The file's content. Paths that are not UTF-8 survive: JSON escapes their bytes, Arrow strings would not.

    `previous` is the checksum of the plan file that this one extends.
    """
    metadata = {
        b"files": json.dumps([_stamp(file) for file in plan.files]).encode(),
        b"columns": json.dumps(list(plan.columns.items())).encode(),
        b"arrow_schema": plan.arrow_schema,
    }
    if digests := _digests(plan):
        metadata[b"digests"] = json.dumps(digests).encode()
    metadata[b"ctimes"] = json.dumps([file.ctime_ns for file in plan.files]).encode()
    if previous:
        metadata[b"chain"] = _chain(plan, previous).encode()
    chunks = pa.Table.from_pylist(
        [
            {
                "index": chunk.index,
                "row_index": chunk.row_index,
                "num_rows": chunk.num_rows,
                "segments": [_place(segment) for segment in chunk.segments],
            }
            for chunk in plan.chunks
        ],
        schema=_CHUNKS.with_metadata(metadata),
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, chunks.schema) as writer:
        writer.write_table(chunks)
    return bytes(sink.getvalue())


def plan_from_bytes(data: bytes, *, previous: str = "") -> JobPlan:
    """Raises ValueError (pa.ArrowInvalid is one) or KeyError if the bytes are no plan, or do not follow `previous`."""
    table = pa.ipc.open_file(pa.BufferReader(data)).read_all()
    metadata = table.schema.metadata or {}
    columns = [table.column(name).to_pylist() for name in _CHUNKS.names]
    files = json.loads(metadata[b"files"])
    ctimes: list[int] = json.loads(metadata.get(b"ctimes", b"[]")) or [0] * len(files)
    digests: list[list[str]] = json.loads(metadata.get(b"digests", b"[]")) or [[""] * len(s) for s in columns[-1]]
    plan = JobPlan(
        files=tuple(InputFile(**file, ctime_ns=ctime) for file, ctime in zip(files, ctimes, strict=True)),
        chunks=tuple(
            Chunk(
                index,
                row_index,
                num_rows,
                tuple(Segment(**place, digest=digest) for place, digest in zip(places, known, strict=True)),
            )
            for index, row_index, num_rows, places, known in zip(*columns, digests, strict=True)
        ),
        columns=dict(json.loads(metadata[b"columns"])),
        arrow_schema=metadata[b"arrow_schema"],
    )
    if previous and metadata[b"chain"].decode() != _chain(plan, previous):
        raise ValueError("it does not follow the plan before it")
    return plan


def checksum(data: bytes) -> str:
    """Of a plan file, as job.json and the next plan file hold it."""
    return hashlib.sha256(data).hexdigest()


def join_plans(plan: JobPlan, extension: JobPlan) -> JobPlan:
    """A plan with the files and chunks of an extension behind its own. Raises ValueError unless these follow on."""
    next_row = plan.chunks[-1].row_index + plan.chunks[-1].num_rows if plan.chunks else 0
    for index, chunk in enumerate(extension.chunks, len(plan.chunks)):
        if (chunk.index, chunk.row_index) != (index, next_row):
            raise ValueError(f"its chunk {chunk.index} is not the one that follows row {next_row}")
        next_row += chunk.num_rows
    return replace(
        plan,
        files=plan.files + extension.files,
        chunks=plan.chunks + extension.chunks,
        num_extensions=plan.num_extensions + 1,
    )


def _chain(plan: JobPlan, previous: str) -> str:
    chunks = [{**asdict(chunk), "segments": [_place(segment) for segment in chunk.segments]} for chunk in plan.chunks]
    content: list[object] = [previous, [_stamp(file) for file in plan.files], chunks]
    if digests := _digests(plan):
        content.append(digests)
    return checksum(json.dumps(content).encode())


def _stamp(file: InputFile) -> dict[str, object]:
    """A file in the form that earlier versions read and wrote."""
    stamp = asdict(file)
    del stamp["ctime_ns"]
    return stamp


def _place(segment: Segment) -> dict[str, int]:
    """Where a segment is, without what it holds: the form that earlier versions read and wrote."""
    place = asdict(segment)
    del place["digest"]
    return place


def _digests(plan: JobPlan) -> list[list[str]]:
    """The digests of the segments of each chunk; none where no segment has one."""
    digests = [[segment.digest for segment in chunk.segments] for chunk in plan.chunks]
    return digests if any(any(known) for known in digests) else []
