"""The columns of a job over all its Parquet files, and each file's batches brought to them.

Only carried columns need one type. Where the types of files differ in form alone they are joined; where a value might
not fit the joined type, the column is read once when the job is planned: nothing fails after the rows have run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa

from batchjob.errors import InputDataError
from batchjob.inputs.folders import FOLDER_MARK, is_of_folders, partition_kinds, partition_values
from batchjob.inputs.formats import parquet_file
from batchjob.inputs.unify import conform, is_certain, join

_ARROW = {"int64": pa.int64(), "string": pa.string()}
_FOREIGN_METADATA = (b"pandas", b"huggingface", b"ARROW:schema")  # describe exactly the old set of columns

Schemas = Sequence[tuple[str, pa.Schema]]  # of each file, by its path


def column_names(schemas: Schemas) -> list[str]:
    """All columns of all files in order of first appearance, those of folders last. Raises InputDataError."""
    names: dict[str, None] = {}
    for path, schema in schemas:
        if len(set(schema.names)) != len(schema.names):
            raise InputDataError(f"{path} has two columns of one name; rename one")
        names.update(dict.fromkeys(schema.names))
    names.update(dict.fromkeys(partition_kinds(path for path, _ in schemas)))
    return list(names)


def unify_schemas(schemas: Schemas, kept: Sequence[str]) -> pa.Schema:
    """One schema of the kept columns for all files: null where a file lacks one, and all types of a column joined.

    Types without a common meaning are refused. File metadata is kept where all files agree, but for pandas' and
    datasets' own, which describe the old set of columns. Raises InputDataError.
    """
    folders = partition_kinds(path for path, _ in schemas)
    wanted = set(kept)
    first_fields: dict[str, pa.Field] = {}
    paths: dict[str, dict[pa.DataType, list[str]]] = {name: {} for name in kept}  # of each type of each column
    for path, schema in schemas:
        for field in schema:
            if field.name in wanted:
                known = first_fields.setdefault(field.name, field)
                if pa.types.is_null(known.type):
                    first_fields[field.name] = field
                paths[field.name].setdefault(field.type, []).append(path)
    fields = []
    for name in kept:
        if name in first_fields:
            kind = _common_type(name, paths[name], [other for other in kept if other != name])
            field = first_fields[name].with_type(kind).with_nullable(True)
        else:
            field = pa.field(name, _ARROW[folders[name]])
        if name in folders:
            field = field.with_metadata({**(field.metadata or {}), **FOLDER_MARK})
            for path, schema in schemas:
                if name not in schema.names:
                    folder_column(path, field, 1)
        fields.append(field)
    first = dict(schemas[0][1].metadata or {})
    metadata = {
        key: value
        for key, value in first.items()
        if key not in _FOREIGN_METADATA and all((schema.metadata or {}).get(key) == value for _, schema in schemas)
    }
    return pa.schema(fields, metadata=metadata or None)


def _common_type(name: str, paths: Mapping[pa.DataType, list[str]], others: list[str]) -> pa.DataType:
    kind: pa.DataType = pa.null()
    for other, (path, *_) in paths.items():
        joined = join(kind, other)
        if joined is None:
            known = next(known for known, _ in paths.items() if join(known, other) is None)
            raise InputDataError(
                f"column {name!r} is {known} in {paths[known][0]} but {other} in {path}, which have no type in common; "
                f"cast one of them, run a job for each, or leave the column out: {_without(others)}"
            )
        kind = joined
    for other, those in paths.items():
        if not is_certain(other, kind):
            for path in those:
                check_column(path, name, kind, f"leave the column out: {_without(others)}")
    return kind


def _without(others: list[str]) -> str:
    named = ",".join(others) if others and not any("," in name for name in others) else "none"
    return f"--keep-columns '{named}'" if len(named) <= 500 else "--keep-columns with the names of the others"


def check_column(path: str, name: str, kind: pa.DataType, remedy: str) -> None:
    """Reads one column of a file. Raises InputDataError if a value does not fit."""
    for batch in parquet_file.iter_batches(path, 0, [name]):
        if name not in batch.schema.names:
            return
        column = batch.column(name)
        try:
            conform(column, kind)
        except pa.ArrowException as error:
            raise InputDataError(
                f"column {name!r} is {column.type} in {path}, with values that do not fit {kind}, the type that the "
                f"other files need ({error}); cast one of them, or {remedy}"
            ) from error


def folder_column(path: str, field: pa.Field, num_rows: int) -> pa.Array:
    """A column that a file lacks: what its folders say of it, or nulls. Raises InputDataError."""
    text = partition_values(path).get(field.name) if is_of_folders(field) else None
    if text is None:
        return pa.nulls(num_rows, field.type)
    try:
        value = pa.array([text]).cast(field.type)[0]
    except pa.ArrowException as error:
        raise InputDataError(
            f"{path}: its folder says {field.name}={text}, but the column is {field.type} ({error}). Rename the "
            "folder, or leave the column out with --keep-columns"
        ) from error
    return pa.repeat(value, num_rows)


def carried_batch(path: str, batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch | None:
    """A file's batch in the job's columns; None where it has a column of a type that cannot be one of them.

    Raises InputDataError for a value that does not fit.
    """
    have: Mapping[str, int] = {name: index for index, name in enumerate(batch.schema.names)}
    arrays = []
    for field in schema:
        if field.name not in have:
            arrays.append(folder_column(path, field, batch.num_rows))
            continue
        array = batch.column(have[field.name])
        if array.type != field.type:
            if join(array.type, field.type) is None:
                return None
            try:
                array = conform(array, field.type)
            except pa.ArrowException as error:
                raise InputDataError(
                    f"{path}: column {field.name!r} has a value that does not fit the job's type {field.type}: "
                    f"{error}. Leave the column out with --keep-columns in a new output, or convert it"
                ) from error
        arrays.append(array)
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
