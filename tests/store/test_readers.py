"""OUT/data opens in what people use, at any moment of a job: before the first part, between parts, at the end."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset
import pytest

from batchjob.store import Store
from batchjob.store.columns import OutputColumns


def with_pandas(data: Path) -> int:
    return len(importlib.import_module("pandas").read_parquet(data))


def with_pyarrow(data: Path) -> int:
    return int(pyarrow.dataset.dataset(data).count_rows())


def with_duckdb(data: Path) -> int:
    return int(
        importlib.import_module("duckdb").sql(f"select count(row_index) from '{data}/*.parquet'").fetchall()[0][0]
    )


def with_polars(data: Path) -> int:
    frame = importlib.import_module("polars").scan_parquet(data)
    return len(frame.collect())


def with_datasets(data: Path) -> int:
    datasets = importlib.import_module("datasets")
    datasets.disable_progress_bars()
    return int(datasets.load_dataset(str(data), split="train", cache_dir=str(data.parent.parent / "cache")).num_rows)


READERS: list[tuple[str, Callable[[Path], int]]] = [
    ("pyarrow", with_pyarrow),
    ("pandas", with_pandas),
    ("duckdb", with_duckdb),
    ("polars", with_polars),
    ("datasets", with_datasets),
]
# What the first chunk alone would not show: columns that are null or of one kind in it and not in others.
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64()),
        pa.field("late", pa.string()),
        pa.field("tags", pa.list_(pa.string())),
        pa.field("meta", pa.struct([("a", pa.float64())])),
    ],
    metadata={
        "huggingface": '{"info": {"features": {"id": {"dtype": "int64", "_type": "Value"}}}}',
        "pandas": '{"index_columns": ["id"], "columns": [], "column_indexes": []}',
    },
)


def rows(chunk: Any) -> pa.Table:
    late = chunk.index > 0
    return pa.Table.from_pylist(
        [
            {
                "id": row,
                "late": "x" if late else None,
                "tags": ["a"] if late else [],
                "meta": {"a": 1.0} if late else None,
            }
            for row in range(chunk.row_index, chunk.row_index + chunk.num_rows)
        ],
        schema=SCHEMA,
    )


@pytest.mark.parametrize(("name", "read"), READERS)
def test_a_reader_sees_the_committed_rows(kit: Any, output: Path, name: str, read: Callable[[Path], int]) -> None:
    pytest.importorskip(name)
    plan = kit.make_plan(17, 5, SCHEMA)
    store = Store.create(output, kit.make_manifest(plan, columns=OutputColumns(["output_token_ids"])), plan)
    store.start_attempt({})
    # A part is being written, and logs grow, while it is read.
    open_chunk = store.open_chunk(3)
    open_chunk.add(kit.completion(15))
    (output / ".batchjob" / "tmp" / "00000003.other").write_bytes(b"PAR1 half a part")
    expected = 0
    for index in range(3):
        chunk = store.open_chunk(index)
        for row in range(chunk.chunk.row_index, chunk.chunk.row_index + 5):
            chunk.add(kit.completion(row))
        chunk.commit(rows(chunk.chunk))
        expected += 5
        assert read(output / "data") == expected
    open_chunk.add(kit.completion(16))
    open_chunk.commit(rows(open_chunk.chunk))
    store.finish()
    assert read(output / "data") == 17


# datasets has no way to hold a split without rows.
@pytest.mark.parametrize(("name", "read"), [reader for reader in READERS if reader[0] != "datasets"])
def test_a_reader_opens_the_part_of_an_empty_job(
    kit: Any, output: Path, name: str, read: Callable[[Path], int]
) -> None:
    pytest.importorskip(name)
    kit.Job().run(output, kit.make_plan(0, 5))
    assert read(output / "data") == 0


def test_the_columns_of_a_part_alone_are_those_of_all(kit: Any, output: Path) -> None:
    plan = kit.make_plan(8, 4, SCHEMA)
    store = Store.create(output, kit.make_manifest(plan), plan)
    store.start_attempt({})
    for index in range(2):
        chunk = store.open_chunk(index)
        for row in range(chunk.chunk.row_index, chunk.chunk.row_index + 4):
            chunk.add(kit.completion(row))
        chunk.commit(rows(chunk.chunk))
    one, both = (
        pyarrow.dataset.dataset(path).schema for path in (output / "data" / "part-00000000.parquet", output / "data")
    )
    assert one.remove_metadata() == both.remove_metadata()
    table = pyarrow.dataset.dataset(output / "data").to_table()
    assert table["late"].to_pylist() == [None] * 4 + ["x"] * 4
    frame = pytest.importorskip("pandas").read_parquet(output / "data")
    assert list(frame["id"]) == list(range(8)), "no column is made an index"
