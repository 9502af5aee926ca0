"""A `Plan` as an Arrow IPC file: one row per chunk; input files, columns and the schema in the metadata."""

from __future__ import annotations

import json
from dataclasses import asdict

import pyarrow as pa

from batchjob.plan import Chunk, InputFile, Plan, Segment

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


def plan_to_bytes(plan: Plan) -> bytes:
    """The file's content. Paths that are not UTF-8 survive: JSON escapes their bytes, Arrow strings would not."""
    metadata = {
        b"files": json.dumps([asdict(file) for file in plan.files]).encode(),
        b"columns": json.dumps(list(plan.columns.items())).encode(),
        b"arrow_schema": plan.arrow_schema,
    }
    chunks = pa.Table.from_pylist(
        [
            {
                "index": chunk.index,
                "row_index": chunk.row_index,
                "num_rows": chunk.num_rows,
                "segments": [asdict(segment) for segment in chunk.segments],
            }
            for chunk in plan.chunks
        ],
        schema=_CHUNKS.with_metadata(metadata),
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, chunks.schema) as writer:
        writer.write_table(chunks)
    return bytes(sink.getvalue())


def plan_from_bytes(data: bytes) -> Plan:
    """Raises ValueError (pa.ArrowInvalid is one) or KeyError if the bytes are no plan."""
    table = pa.ipc.open_file(pa.BufferReader(data)).read_all()
    metadata = table.schema.metadata or {}
    columns = [table.column(name).to_pylist() for name in _CHUNKS.names]
    return Plan(
        files=tuple(InputFile(**file) for file in json.loads(metadata[b"files"])),
        chunks=tuple(
            Chunk(index, row_index, num_rows, tuple(Segment(**segment) for segment in segments))
            for index, row_index, num_rows, segments in zip(*columns, strict=True)
        ),
        columns=dict(json.loads(metadata[b"columns"])),
        arrow_schema=metadata[b"arrow_schema"],
    )
