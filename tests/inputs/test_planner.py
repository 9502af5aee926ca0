"""The plan: which files, which chunks, which columns. Deterministic, and every row is in exactly one chunk."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchjob.errors import InputDataError
from batchjob.inputs import planner, row_index
from batchjob.inputs.planner import PlanResult, chunk_size, make_plan, shared_streams
from batchjob.inputs.reader import InputReader
from batchjob.plan import JobPlan
from batchjob.records import Record
from batchjob.spec import JobSpec

PlanOf = Callable[..., PlanResult]
WriteJsonl = Callable[[Path, Iterable[Any]], Path]
Write = Callable[[str, bytes], Path]


def schema(plan: JobPlan) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(plan.arrow_schema))


@pytest.mark.parametrize(
    ("rows", "workers", "samples", "expected"),
    [
        (10, 1, 1, 64),
        (64 * 100, 1, 1, 100),
        (64 * 100, 4, 1, 64),
        (10_000_000, 1, 1, 20_000),
        (1_000_000_000, 1, 1, 100_000),  # at most 10,000 parts
        (100, 1, 16, 4),
        (10_000_000, 1, 16, 1_250),
        (100, 1, 100_000, 1),  # a row is never split
        (0, 1, 1, 64),
    ],
)
def test_chunk_size_follows_rows_workers_and_samples(rows: int, workers: int, samples: int, expected: int) -> None:
    assert chunk_size(rows, num_workers=workers, samples=samples) == expected


@given(
    files=st.lists(
        st.lists(st.sampled_from(["{}", '{"a": 1}', "", "  ", "broken"]), max_size=9), min_size=1, max_size=4
    ),
    chunk_rows=st.integers(1, 7),
    limit=st.none() | st.integers(0, 12),
    packed=st.booleans(),
)
def test_every_row_is_in_one_chunk_and_every_chunk_can_be_read_alone(
    tmp_path_factory: pytest.TempPathFactory, files: list[list[str]], chunk_rows: int, limit: int | None, packed: bool
) -> None:
    root = tmp_path_factory.mktemp("plan")
    expected: list[tuple[str, int]] = []
    for index, lines in enumerate(files):
        path = root / (f"{index}.jsonl" + ".gz" * packed)
        data = "\n".join(lines).encode()
        path.write_bytes(gzip.compress(data) if packed else data)
        expected += [(str(path), number) for number, line in enumerate(lines, 1) if line.strip()]
    expected = expected[:limit]
    try:
        result = make_plan(JobSpec(input=(str(root),), chunk_rows=chunk_rows, limit=limit))
    except InputDataError:
        assert all(Path(path).read_bytes() for path, _ in expected)
        return  # not one row is an object
    plan = result.plan
    assert plan.num_rows == len(expected)
    assert [chunk.row_index for chunk in plan.chunks] == list(range(0, len(expected), chunk_rows))
    for chunk in plan.chunks:
        reader = InputReader(plan)
        found = [(record.row_index, record.where) for record in reader.rows(chunk, None)]
        stop = chunk.row_index + chunk.num_rows
        assert found == [(i, "{}:{}".format(*expected[i])) for i in range(chunk.row_index, stop)]
        assert reader.carried(chunk).num_rows == chunk.num_rows
        reader.close()


def test_the_index_of_positions_stays_small(
    tmp_path: Path, write_jsonl: WriteJsonl, monkeypatch: pytest.MonkeyPatch, plan_of: PlanOf
) -> None:
    monkeypatch.setattr(row_index, "_MAX_INDEX", 8)
    monkeypatch.setattr(planner, "MIN_CHUNK", 2)
    path = write_jsonl(tmp_path / "a.jsonl", [{"a": index} for index in range(1000)])
    plan = plan_of(path).plan
    sizes = {chunk.num_rows for chunk in plan.chunks[:-1]}
    assert sizes == {256}  # 1000 / 64 = 16, aligned to the index, whose step has doubled from 2
    reader = InputReader(plan)
    assert [r.fields["a"] for chunk in plan.chunks for r in reader.rows(chunk, None)] == list(range(1000))
    reader.close()


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_chunk_size_that_is_given_makes_as_many_chunks_as_that_takes(
    tmp_path: Path, write_jsonl: WriteJsonl, monkeypatch: pytest.MonkeyPatch, plan_of: PlanOf, ending: str
) -> None:
    monkeypatch.setattr(planner, "MAX_PARTS", 8)
    rows = [{"a": index} for index in range(100)]
    path = tmp_path / f"a.{ending}"
    if ending == "jsonl":
        write_jsonl(path, rows)
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    assert [chunk.num_rows for chunk in plan_of(path, chunk_rows=5).plan.chunks] == [5] * 20


def test_a_plan_is_deterministic(tmp_path: Path, write_jsonl: WriteJsonl, plan_of: PlanOf) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"a": index} for index in range(300)])
    assert plan_of(path) == plan_of(path)


def test_types_hold_over_all_files_not_only_the_first_block(
    tmp_path: Path, write_jsonl: WriteJsonl, plan_of: PlanOf
) -> None:
    write_jsonl(tmp_path / "1.jsonl", [{"a": 1, "b": 2, "c": True, "d": 0.5, "e": "x", "g": None} for _ in range(5000)])
    write_jsonl(tmp_path / "2.jsonl", [{"a": None, "b": "two", "f": [1]}])
    plan = plan_of(tmp_path).plan
    assert dict(plan.columns) == {
        "a": "int64",
        "b": "json",
        "c": "bool",
        "d": "double",
        "e": "string",
        "g": "string",
        "f": "json",
    }
    assert [str(field.type) for field in schema(plan)] == ["int64", "string", "bool", "double", *["string"] * 3]


@pytest.mark.parametrize(
    ("keep", "expected"), [("all", ["a", "b", "c"]), ("none", []), ("c, a", ["a", "c"]), ("b", ["b"])]
)
def test_keep_columns(tmp_path: Path, write_jsonl: WriteJsonl, plan_of: PlanOf, keep: str, expected: list[str]) -> None:
    result = plan_of(write_jsonl(tmp_path / "a.jsonl", [{"a": 1, "b": 2, "c": 3}]), keep_columns=keep)
    assert list(result.plan.columns) == schema(result.plan).names == expected
    assert list(result.columns) == ["a", "b", "c"]
    reader = InputReader(result.plan)
    table = reader.carried(result.plan.chunks[0])
    assert (table.num_rows, table.column_names) == (1, expected)


def test_keep_columns_with_an_unknown_name_lists_the_known_ones(
    tmp_path: Path, write_jsonl: WriteJsonl, plan_of: PlanOf
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"a": 1, "b": 2}])
    with pytest.raises(InputDataError, match=r"'zz'.*columns: a, b"):
        plan_of(path, keep_columns="a,zz")


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_no_rows_give_a_plan_without_chunks(write: Write, plan_of: PlanOf, name: str) -> None:
    plan = plan_of(write(name, b"\n\n")).plan
    assert (plan.num_rows, plan.chunks, len(plan.files)) == (0, (), 1)


def test_files_without_one_object_are_refused_with_the_first_error(write: Write, plan_of: PlanOf) -> None:
    path = write("a.jsonl", b'"one"\n"two"\n')
    with pytest.raises(InputDataError, match=r"2 rows.*a\.jsonl:1: the line is a bare str"):
        plan_of(path)


@pytest.mark.parametrize("text", ['[\n  {"prompt": "x"}\n]', '{\n  "prompt": "x"\n}'])
def test_a_json_document_is_refused_with_a_remedy(write: Write, plan_of: PlanOf, text: str) -> None:
    with pytest.raises(InputDataError, match="not JSON Lines"):
        plan_of(write("a.json", text.encode()))


def test_json_lines_in_a_json_file_are_read(write: Write, plan_of: PlanOf) -> None:
    assert plan_of(write("a.json", b'{"a": 1}\n{"a": 2}')).plan.num_rows == 2


def test_too_many_different_keys_are_refused(write: Write, plan_of: PlanOf) -> None:
    rows = b"".join(json.dumps({f"k{index}": 1}).encode() + b"\n" for index in range(5000))
    with pytest.raises(InputDataError, match="different keys"):
        plan_of(write("a.jsonl", rows))


def test_a_damaged_file_is_a_warning_and_a_row(write: Write, plan_of: PlanOf, read_all: Callable[..., Any]) -> None:
    path = write("a.jsonl.gz", b"".join(b'{"a": %d}\n' % (index * 7919**3) for index in range(2000)))
    path.write_bytes(path.read_bytes()[:-100])
    result = plan_of(path)
    assert "damaged" in result.warnings[0]
    records: list[Record] = read_all(result)
    assert len(records) == result.plan.num_rows < 2001
    assert [record.error.type for record in records if record.error] == ["input_damaged"]
    assert records[-1].error is not None


# -- Parquet


def table(**columns: Any) -> pa.Table:
    return pa.table(columns)


def test_parquet_is_planned_from_footers_alone(
    tmp_path: Path, plan_of: PlanOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(table(a=list(range(1000))), tmp_path / "a.parquet", row_group_size=64)
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", None)
    plan = plan_of(tmp_path / "a.parquet", chunk_rows=300).plan
    assert [chunk.num_rows for chunk in plan.chunks] == [300, 300, 300, 100]


def test_columns_of_several_files_are_joined_by_name(tmp_path: Path, plan_of: PlanOf, carried_all: Any) -> None:
    pq.write_table(table(a=[1], n=pa.nulls(1)), tmp_path / "1.parquet")
    pq.write_table(table(n=["x"], b=[2.5]), tmp_path / "2.parquet")
    result = plan_of(tmp_path)
    assert schema(result.plan) == pa.schema([("a", pa.int64()), ("n", pa.string()), ("b", pa.float64())])
    assert carried_all(result) == [{"a": 1, "n": None, "b": None}, {"a": None, "n": "x", "b": 2.5}]


def test_types_that_differ_between_files_are_refused_naming_both(tmp_path: Path, plan_of: PlanOf) -> None:
    pq.write_table(table(a=[1]), tmp_path / "1.parquet")
    pq.write_table(table(a=["x"]), tmp_path / "2.parquet")
    with pytest.raises(InputDataError, match=r"'a' is int64 in .*1\.parquet but string in .*2\.parquet"):
        plan_of(tmp_path)


def test_file_metadata_is_kept_but_for_what_describes_the_old_columns(tmp_path: Path, plan_of: PlanOf) -> None:
    meta = {"owner": "me", "pandas": "{}", "huggingface": "{}"}
    pq.write_table(table(a=[1]).replace_schema_metadata(meta), tmp_path / "a.parquet")
    assert schema(plan_of(tmp_path / "a.parquet").plan).metadata == {b"owner": b"me"}


def test_a_damaged_parquet_file_is_refused_by_name(tmp_path: Path, plan_of: PlanOf) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(table(a=[1]), path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(InputDataError, match=r"a\.parquet"):
        plan_of(path)


def test_limit_takes_the_first_rows_and_only_the_files_they_need(tmp_path: Path, plan_of: PlanOf) -> None:
    for index in range(3):
        pq.write_table(table(a=[index] * 10), tmp_path / f"{index}.parquet")
    plan = plan_of(tmp_path, limit=15).plan
    assert [file.num_rows for file in plan.files] == [10, 5]
    assert plan.num_rows == 15


def test_only_compressed_files_of_several_shards_are_warned_of(tmp_path: Path) -> None:
    rows = b"".join(b'{"prompt": "row %d"}\n' % number for number in range(400))
    for number in range(4):
        (tmp_path / f"{number}.jsonl.gz").write_bytes(gzip.compress(rows))
    spec = JobSpec(engine="fake", input=(str(tmp_path / "*.jsonl.gz"),), chunk_rows=400)
    assert shared_streams(make_plan(spec).plan, 4) == []
    assert "(and 3 more files like it)" in shared_streams(make_plan(spec.replace(chunk_rows=200)).plan, 4)[0]
