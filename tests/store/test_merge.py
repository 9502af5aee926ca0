"""Merging a job into Parquet or JSONL."""

from __future__ import annotations

import errno
import json
import math
import os
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchjob.errors import OutputCreateError, StoppedEarlyError, StorageError, UsageError
from batchjob.store import Store, merge
from batchjob.store.paths import Layout


@pytest.fixture
def plan(kit: Any) -> Any:
    return kit.make_plan(50, 8)


@pytest.fixture
def finished(kit: Any, output: Path, plan: Any) -> Path:
    kit.Job().run(output, plan, num_samples=2)
    return output


def expected(kit: Any) -> list[dict[str, Any]]:
    return [kit.expected_row(row, sample) for row in range(50) for sample in range(2)]


def test_to_one_parquet_file(kit: Any, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchjob.store.mergefiles._GROUP_ROWS", 40)
    assert merge(finished, tmp_path / "new" / "all.parquet") == 100
    table = pq.read_table(tmp_path / "new" / "all.parquet")
    assert table.to_pylist() == expected(kit)
    assert table.schema.remove_metadata() == Store.open(finished).manifest.arrow_schema.remove_metadata()
    metadata = pq.read_metadata(tmp_path / "new" / "all.parquet")
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [48, 48, 4]
    assert os.listdir(tmp_path / "new") == ["all.parquet"]


def test_to_a_directory(kit: Any, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchjob.store.mergefiles._GROUP_ROWS", 10)
    monkeypatch.setattr("batchjob.store.mergefiles._FILE_BYTES", 5000)
    assert merge(str(finished), f"{tmp_path}/all/") == 100
    names = sorted(os.listdir(tmp_path / "all"))
    assert len(names) > 1
    assert names[:2] == ["part-00000.parquet", "part-00001.parquet"]
    assert pq.read_table(tmp_path / "all").to_pylist() == expected(kit)


def test_to_jsonl(kit: Any, finished: Path, tmp_path: Path) -> None:
    assert merge(finished, tmp_path / "all.jsonl") == 100
    text = (tmp_path / "all.jsonl").read_bytes()
    assert text.endswith(b"}\n")
    rows = [json.loads(line) for line in text.split(b"\n")[:-1]]
    # A carried column of JSON text comes out as the value that it is.
    assert rows == [{**row, "extra": json.loads(row["extra"])} for row in expected(kit)]
    assert b'"extra":{"row": 7},' in text, "byte for byte as in the input"


def test_an_empty_job(kit: Any, output: Path, tmp_path: Path) -> None:
    kit.Job().run(output, kit.make_plan(0, 5))
    assert merge(output, tmp_path / "all.jsonl") == 0
    assert merge(output, tmp_path / "all.parquet") == 0
    assert (tmp_path / "all.jsonl").read_bytes() == b""
    assert pq.read_table(tmp_path / "all.parquet").column_names[:3] == ["row_index", "sample_index", "question"]


def test_what_is_missing_is_not_merged_in_silence(kit: Any, finished: Path, tmp_path: Path) -> None:
    Layout(finished).part(2).unlink()
    with pytest.raises(StoppedEarlyError, match="not complete: 6 of 7 parts"):
        merge(finished, tmp_path / "all.jsonl")
    assert merge(finished, tmp_path / "all.jsonl", partial=True) == 84


def test_what_is_there_is_not_replaced(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "all.jsonl").write_text("mine")
    with pytest.raises(OutputCreateError, match="exists"):
        merge(finished, tmp_path / "all.jsonl")
    assert (tmp_path / "all.jsonl").read_text() == "mine"
    for place in (finished, finished / "data", finished / "data" / "all.parquet"):
        with pytest.raises(UsageError, match="choose another place"):
            merge(finished, place)
    with pytest.raises(UsageError, match="unknown format"):
        merge(finished, tmp_path / "all.csv", "csv")
    with pytest.raises(UsageError, match="one file"):
        merge(finished, f"{tmp_path}/x/", "jsonl")
    with pytest.raises(UsageError, match="no output directory"):
        merge(tmp_path, tmp_path / "other.jsonl")


def test_a_place_that_is_none_or_does_not_tell_its_format_is_refused(finished: Path, tmp_path: Path) -> None:
    for name in ("all.csv", "all.jsonl.gz", "all"):
        with pytest.raises(UsageError, match=r"end it in \.parquet or \.jsonl"):
            merge(finished, tmp_path / name)
    for place in ("s3://bucket/all.parquet", Path("s3://bucket/all.parquet"), "file:///all.jsonl"):
        with pytest.raises(UsageError, match="only local paths"):
            merge(finished, place)
    assert merge(finished, tmp_path / "all", "jsonl") == 100
    assert sorted(os.listdir(tmp_path)) == sorted(["all", finished.name])


def test_a_damaged_page_is_found_by_the_full_read(finished: Path, tmp_path: Path) -> None:
    path = Layout(finished).part(1)
    data = bytearray(path.read_bytes())
    column = pq.read_metadata(path).row_group(0).column(2)  # the footer does not know what is in the pages
    data[column.data_page_offset + column.total_compressed_size - 6] ^= 0xFF
    path.write_bytes(bytes(data))
    assert Store.open(finished).committed() == set(range(7))
    for name in ("all.parquet", "all.jsonl"):
        with pytest.raises(StorageError, match=r"part-00000001\.parquet is damaged"):
            merge(finished, tmp_path / name)
        assert sorted(os.listdir(tmp_path)) == ["out"], "nothing is left behind"


@pytest.mark.parametrize("name", ["all.parquet", "all.jsonl", "all/"])
def test_an_interrupted_merge_is_run_again(kit: Any, finished: Path, tmp_path: Path, name: str) -> None:
    for k in range(0, 1000, 3):
        fs = kit.FaultyFs(k)
        try:
            merge(finished, f"{tmp_path}/{k}/{name}", fs=fs)
            break
        except kit.Crash:
            fs.release()
            path = tmp_path / str(k) / name
            if not path.exists():
                assert merge(finished, f"{tmp_path}/{k}/{name}", fs=kit.FastFs()) == 100
            # Under its name it is complete, whenever the crash came.
            num_rows = path.read_bytes().count(b"\n") if name == "all.jsonl" else pq.read_table(path).num_rows
            assert num_rows == 100
    assert k > 30


def test_a_full_disk_leaves_nothing_behind(kit: Any, finished: Path, tmp_path: Path) -> None:
    for name in ("all.parquet", "all.jsonl"):
        fs = kit.FaultyFs(0, only=["write"], error=errno.ENOSPC)
        with pytest.raises(StorageError, match=r"the disk is full: writing .*all"):
            merge(finished, tmp_path / name, fs=fs)
    assert os.listdir(tmp_path) == ["out"]


RICH = pa.schema(
    [
        pa.field("id", pa.uint64()),
        pa.field("f", pa.float64()),
        pa.field("f16", pa.float16()),
        pa.field("ns", pa.timestamp("ns", "Europe/Zurich")),
        pa.field("us", pa.timestamp("us")),
        pa.field("bin", pa.binary()),
        pa.field("dec", pa.decimal128(20, 4)),
        pa.field("words", pa.list_(pa.string())),
        pa.field("nested", pa.list_(pa.struct([("a", pa.int32()), ("b", pa.list_(pa.float32()))]))),
        pa.field("kind", pa.dictionary(pa.int32(), pa.string())),
        pa.field("large", pa.large_string()),
        pa.field("map", pa.map_(pa.string(), pa.int64())),
        pa.field("nothing", pa.null()),
        pa.field("date", pa.date32()),
        pa.field("dur", pa.duration("us")),
    ],
    metadata={"dataset": "kept"},
)


def rich_rows(first: int, number: int) -> pa.Table:
    rows = [
        {
            "id": 2**64 - 1 - i,
            "f": [math.inf, None, 0.1][i % 3],
            "f16": 1.5,
            "ns": None,
            "us": datetime(2024, 1, 1, 0, 0, i),
            "bin": bytes([i]),
            "dec": Decimal(i).scaleb(-4),
            "words": [f"w{i}", None] if i % 2 else None,
            "nested": [{"a": i, "b": [0.5, None]}, None],
            "kind": f"k{i % 3}" if i % 4 else None,
            "large": "x" * i,
            "map": [("k", i)],
            "nothing": None,
            "date": None,
            "dur": None,
        }
        for i in range(first, first + number)
    ]
    table = pa.Table.from_pylist(rows, schema=RICH)
    stamps = pa.array([10**18 + i for i in range(first, first + number)], pa.int64()).cast(RICH.field("ns").type)
    return table.set_column(table.column_names.index("ns"), RICH.field("ns"), stamps)


@pytest.mark.parametrize("num_samples", [1, 2])
def test_columns_of_every_type_come_out_unchanged(
    kit: Any, output: Path, tmp_path: Path, num_samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchjob.store.rows._GROUP_ROWS", 5)
    plan = kit.make_plan(20, 8, RICH)
    store = Store.create(output, kit.make_manifest(plan, num_samples=num_samples), plan)
    store.start_attempt({})
    for chunk in plan.chunks:
        opened = store.open_chunk(chunk.index)
        for row in range(chunk.row_index, chunk.row_index + chunk.num_rows):
            for sample in range(num_samples):
                opened.add(kit.completion(row, sample))
        opened.commit(rich_rows(chunk.row_index, chunk.num_rows))
    merge(output, tmp_path / "all.parquet")
    wanted = rich_rows(0, 20).take(pa.array([row for row in range(20) for _ in range(num_samples)]))
    for source in (output / "data", tmp_path / "all.parquet"):
        table = pq.read_table(source)
        assert table.select(RICH.names).schema.remove_metadata() == RICH.remove_metadata()
        assert table.schema.metadata[b"dataset"] == b"kept"
        found = table.select(RICH.names)
        for name in RICH.names:
            if name == "kind":  # parts have dictionaries of their own; the values count
                assert found[name].to_pylist() == wanted[name].to_pylist()
            else:
                assert found[name].combine_chunks() == wanted[name].combine_chunks(), name
    merge(output, tmp_path / "all.jsonl")
    row = json.loads((tmp_path / "all.jsonl").read_text().split("\n")[num_samples])
    assert row["id"] == 2**64 - 2
    assert row["ns"] == "2001-09-09T01:46:40.000000001Z"
    assert row["dec"] == "0.0001"
    assert row["nested"] == [{"a": 1, "b": [0.5, None]}, None]
