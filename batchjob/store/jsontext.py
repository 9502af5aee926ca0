"""Arrow values as strict JSON text, for `merge` to JSONL. `json_values` has the rules for what JSON cannot say.

Integers have all their digits, floats are the shortest text that reads back equal, and a carried column that holds JSON
text gives that text, byte for byte.
"""

from __future__ import annotations

import json
from json.encoder import encode_basestring

import pyarrow as pa

from batchjob.json_values import is_text, json_values
from batchjob.store.schema import JSON_MARK


def row_texts(table: pa.Table | pa.RecordBatch) -> list[str]:
    """One JSON object per row, without newlines between."""
    cells = [
        [f"{encode_basestring(field.name)}:{text}" for text in column_texts(table.column(i), field)]
        for i, field in enumerate(table.schema)
    ]
    return ["{" + ",".join(row) + "}" for row in zip(*cells, strict=True)]


def column_texts(column: pa.Array | pa.ChunkedArray, field: pa.Field) -> list[str]:
    """The JSON text of every value of a column."""
    kind = field.type
    if (field.metadata or {}).get(b"batchjob.json") == JSON_MARK[b"batchjob.json"]:
        return ["null" if value is None else value for value in column.to_pylist()]
    if pa.types.is_integer(kind):
        return ["null" if value is None else str(value) for value in column.to_pylist()]
    if is_text(kind):
        return ["null" if value is None else encode_basestring(value) for value in column.to_pylist()]
    dump = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    return [dump(value) for chunk in chunks for value in json_values(chunk)]
