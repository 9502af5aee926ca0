"""The schema of the output: the row's place, the carried columns of the input, the generated columns."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
import pyarrow.parquet as pq

from batchjob.errors import InputDataError, UsageError
from batchjob.plan import JobPlan
from batchjob.store.columns import FIRST_GENERATED, NUM_PLACE_COLUMNS, OWN_COLUMNS, OutputColumns

# Marks a carried column that holds the JSON text of each value.
JSON_MARK = {b"batchjob.json": b"true"}
# File metadata of the input that would be wrong for the output: pandas' describes the columns and index of another
# table, and ARROW:schema is written again by the writer.
_DROPPED_METADATA = (b"pandas", b"ARROW:schema")


def check_column_names(names: Iterable[str]) -> None:
    """Raises UsageError if a carried column has the name of a generated one, or if a name comes twice."""
    names = list(names)
    clashes = [name for name in names if name in OWN_COLUMNS]
    if clashes:
        rest = ",".join(name for name in names if name not in OWN_COLUMNS) or "none"
        shown = ", ".join(repr(name) for name in clashes)
        raise UsageError(
            f"the output has columns of its own named {shown}, as the input has. Leave the input's out with "
            f"--keep-columns {rest!r}, or rename them in the input."
        )
    doubles = sorted({name for name in names if names.count(name) > 1})
    if doubles:
        raise UsageError(f"the input has several columns named {', '.join(map(repr, doubles))}; rename them")


def output_schema(plan: JobPlan, columns: OutputColumns) -> pa.Schema:
    """The schema of every part of a job. Raises UsageError on a clash of names."""
    carried = carried_schema(plan)
    check_column_names(carried.names)
    for field in carried:
        _check_storable(field)
    kept = {key: value for key, value in (carried.metadata or {}).items() if key not in _DROPPED_METADATA}
    return pa.schema(columns.schema(carried), metadata=kept or None)


def carried_schema(plan: JobPlan) -> pa.Schema:
    """The carried columns of a plan; those that hold JSON text are marked."""
    if not plan.arrow_schema:
        return pa.schema([])
    schema = pa.ipc.read_schema(pa.BufferReader(plan.arrow_schema))
    fields = [
        field.with_metadata({**(field.metadata or {}), **JSON_MARK})
        if plan.columns.get(field.name) == "json"
        else field
        for field in schema
    ]
    return pa.schema(fields, metadata=schema.metadata)


def carried_names(schema: pa.Schema) -> list[str]:
    """The names of the carried columns in the schema of a part."""
    return list(schema.names[NUM_PLACE_COLUMNS : schema.names.index(FIRST_GENERATED)])


def _check_storable(field: pa.Field) -> None:
    """Raises InputDataError for a type that Parquet cannot hold, before anything is generated."""
    sink = pa.BufferOutputStream()
    try:
        pq.ParquetWriter(sink, pa.schema([field])).close()
        kept = pq.read_schema(pa.BufferReader(sink.getvalue())).field(0).type
        problem = None if kept == field.type else f"it would become {kept}"
    except (pa.ArrowException, NotImplementedError) as error:
        problem = str(error)
    if problem is not None:
        raise InputDataError(
            f"column {field.name!r} of type {field.type} cannot be stored in Parquet ({problem}). Leave it out with "
            "--keep-columns, or change its type in the input."
        )
