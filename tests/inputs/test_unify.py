"""Columns of several Parquet files whose types differ in form alone become one; others are refused."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchjob.errors import InputDataError
from batchjob.inputs.extend import plan_extension
from batchjob.inputs.formats.detect import detect
from batchjob.inputs.planner import PlanResult
from batchjob.inputs.reader import InputReader
from batchjob.inputs.unify import conform, join
from batchjob.records import Record
from batchjob.spec import JobSpec

PlanOf = Callable[..., PlanResult]
ReadAll = Callable[..., list[Record]]
CarriedAll = Callable[[PlanResult], list[dict[str, Any]]]
TEXT = pa.string()
DAY = dt.datetime(2024, 2, 29, 1, 2, 3)
US, NS = pa.timestamp("us"), pa.timestamp("ns")

SAME = [
    (TEXT, pa.large_string(), pa.large_string(), "x"),
    (TEXT, pa.string_view(), TEXT, "x"),
    (pa.dictionary(pa.int32(), TEXT), TEXT, TEXT, "x"),
    (pa.dictionary(pa.int32(), TEXT), pa.dictionary(pa.int8(), pa.large_string()), pa.large_string(), "x"),
    (pa.binary(), pa.binary(2), pa.binary(), b"xy"),
    (pa.binary_view(), pa.large_binary(), pa.large_binary(), b"xy"),
    (pa.int8(), pa.int64(), pa.int64(), 7),
    (pa.uint8(), pa.int8(), pa.int16(), 7),
    (pa.uint32(), pa.int32(), pa.int64(), 7),
    (pa.uint64(), pa.int64(), pa.int64(), 7),
    (pa.float32(), pa.float64(), pa.float64(), 0.5),
    (pa.timestamp("ms"), US, US, DAY),
    (US, NS, NS, DAY),
    (pa.timestamp("ms", "UTC"), pa.timestamp("ns", "UTC"), pa.timestamp("ns", "UTC"), DAY),
    (pa.time32("ms"), pa.time64("ns"), pa.time64("ns"), dt.time(1, 2, 3)),
    (pa.decimal128(5, 2), pa.decimal128(9, 4), pa.decimal128(9, 4), Decimal("1.25")),
    (pa.decimal128(38, 0), pa.decimal128(9, 4), pa.decimal256(42, 4), Decimal("1")),
    (pa.null(), pa.list_(TEXT), pa.list_(TEXT), None),
    (pa.list_(TEXT), pa.large_list(pa.large_string()), pa.large_list(pa.large_string()), ["x", None]),
    (pa.list_(pa.int32(), 2), pa.list_(pa.int64()), pa.list_(pa.int64()), [1, 2]),
    (pa.list_(pa.null()), pa.list_(TEXT), pa.list_(TEXT), []),
    (pa.map_(TEXT, pa.int32()), pa.map_(TEXT, pa.int64()), pa.map_(TEXT, pa.int64()), [("a", 1)]),
    (
        pa.list_(pa.struct([("role", TEXT), ("content", TEXT)])),
        pa.list_(pa.struct([("content", pa.large_string()), ("role", TEXT), ("name", TEXT)])),
        pa.list_(pa.struct([("role", TEXT), ("content", pa.large_string()), ("name", TEXT)])),
        [{"role": "user", "content": "x"}],
    ),
]  # fmt: skip


def filled(value: Any, kind: pa.DataType) -> Any:
    """A value with null in the place of fields that the type has and it has not."""
    if isinstance(value, dict):
        return {field.name: filled(value.get(field.name), field.type) for field in kind}
    return [filled(item, kind.value_type) for item in value] if pa.types.is_list(kind) and value else value


@pytest.mark.parametrize(("a", "b", "both", "value"), SAME, ids=[f"{a} and {b}" for a, b, _, _ in SAME])
def test_types_of_one_meaning_are_joined(a: pa.DataType, b: pa.DataType, both: pa.DataType, value: Any) -> None:
    assert join(a, b) == both
    assert join(b, a) is not None
    for kind in (a, b):
        array = pa.array([value, value, None, value], kind)
        for piece in (array, array.slice(1), array.slice(1, 2), array.slice(0, 0)):
            made = conform(piece, both)
            made.validate(full=True)
            assert made.type == both
            assert made.to_pylist() == [filled(item, both) for item in piece.to_pylist()]


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (TEXT, pa.int64()), (TEXT, pa.binary()), (pa.int64(), pa.float64()), (pa.bool_(), pa.int8()), (US, pa.date32()),
        (US, pa.timestamp("us", "UTC")), (pa.timestamp("us", "Asia/Tokyo"), pa.timestamp("us", "UTC")),
        (pa.list_(TEXT), TEXT), (pa.struct([("a", TEXT)]), pa.struct([("a", US)])), (pa.list_(US), pa.list_view(NS)),
        (pa.decimal128(38, 0), pa.decimal256(76, 50)),
    ],
)  # fmt: skip
def test_types_of_other_meanings_are_not(a: pa.DataType, b: pa.DataType) -> None:
    assert join(a, b) is None
    assert join(b, a) is None


def write_two(root: Path, a: pa.Array, b: pa.Array) -> Path:
    root.mkdir(exist_ok=True)
    for name, column in (("1", a), ("2", b)):
        table = pa.table({"prompt": [f"p{i}" for i in range(len(column))], "x": column})
        pq.write_table(table, root / f"{name}.parquet")
    return root


def test_a_directory_of_such_files_is_one_job(tmp_path: Path, plan_of: PlanOf, carried_all: CarriedAll) -> None:
    root = write_two(tmp_path / "in", pa.array([1, None], pa.int16()), pa.array([2**40], pa.int64()))
    assert [row["x"] for row in carried_all(plan_of(root, chunk_rows=2))] == [1, None, 2**40]
    root = write_two(tmp_path / "in", pa.array(["a", "b"]).dictionary_encode(), pa.array(["c"], pa.large_string()))
    assert [row["x"] for row in carried_all(plan_of(root, chunk_rows=2))] == ["a", "b", "c"]


def test_values_that_do_not_fit_are_found_when_the_job_is_planned(tmp_path: Path, plan_of: PlanOf) -> None:
    far = pa.array([0, 253402300799 * 10**6], pa.int64()).view(US)
    root = write_two(tmp_path / "in", pa.array([DAY], NS), far)
    with pytest.raises(InputDataError, match=r"2\.parquet, with values that do not fit .*--keep-columns 'prompt'"):
        plan_of(root)
    assert plan_of(root, keep_columns="prompt").plan.num_rows == 3
    root = write_two(tmp_path / "in", pa.array([-1]), pa.array([2**64 - 1], pa.uint64()))
    with pytest.raises(InputDataError, match="do not fit int64"):
        plan_of(root)


def test_columns_that_are_left_out_do_not_matter(
    tmp_path: Path, plan_of: PlanOf, read_all: ReadAll, carried_all: CarriedAll
) -> None:
    root = write_two(tmp_path / "in", pa.array([1]), pa.array(["x"]))
    with pytest.raises(InputDataError, match=r"'x' is int64 in .*1\.parquet but string in .*--keep-columns 'prompt'"):
        plan_of(root)
    result = plan_of(root, keep_columns="prompt")
    assert list(result.columns) == ["prompt", "x"]
    assert carried_all(result) == [{"prompt": "p0"}] * 2
    assert [record.fields["x"] for record in read_all(result, ["x"])] == [1, "x"]


def test_an_extension_may_differ_in_form(tmp_path: Path, plan_of: PlanOf) -> None:
    root = write_two(tmp_path / "in", pa.array([1]), pa.array([2]))
    plan = plan_of(root / "1.parquet").plan
    for column in (pa.array([3], pa.int8()), pa.array([3], pa.uint64())):
        new = write_two(tmp_path / "in", column, column) / "2.parquet"
        found = plan_extension(JobSpec(input=(str(root),)), plan, [detect(str(new))]).plan
        assert found.arrow_schema == plan.arrow_schema
    new = write_two(tmp_path / "in", pa.array([3], pa.uint64()), pa.array([2**63], pa.uint64())) / "2.parquet"
    with pytest.raises(InputDataError, match="do not fit int64"):
        plan_extension(JobSpec(input=(str(root),)), plan, [detect(str(new))])


# -- columns that folders give


def write_folders(root: Path, names: list[str], write: Callable[[Path, int], None]) -> None:
    for index, name in enumerate(names):
        (root / name).mkdir(parents=True)
        write(root / name / "part-0", index)


def as_parquet(path: Path, index: int) -> None:
    pq.write_table(pa.table({"prompt": [f"p{index}"]}), path.with_suffix(".parquet"))


def as_jsonl(path: Path, index: int) -> None:
    path.with_suffix(".jsonl").write_text(f'{{"prompt": "p{index}"}}\n')


@pytest.mark.parametrize("write", [as_parquet, as_jsonl])
def test_folders_give_columns_however_their_files_are_named(
    tmp_path: Path, plan_of: PlanOf, carried_all: CarriedAll, read_all: ReadAll, write: Callable[[Path, int], None]
) -> None:
    root = tmp_path / "run=5" / "in"
    write_folders(root, ["lang=de/year=2023", "lang=a%2Fb/year=2024", "lang=__HIVE_DEFAULT_PARTITION__/year=-1"], write)
    ending = ".parquet" if write is as_parquet else ".jsonl"
    expected = [
        {"prompt": "p2", "lang": None, "year": -1},
        {"prompt": "p1", "lang": "a/b", "year": 2024},
        {"prompt": "p0", "lang": "de", "year": 2023},
    ]
    for pattern in (root, root / "**" / f"*{ending}", root / "lang=*", tmp_path):
        result = plan_of(pattern)
        assert carried_all(result) == expected
        assert [r.fields for r in read_all(result, ["lang", "year"])][1] == {"lang": "a/b", "year": "2024"}
    single = plan_of(root / "lang=de" / "year=2023" / f"part-0{ending}")
    assert carried_all(single) == [expected[2]]
    assert list(plan_of(root, keep_columns="lang").plan.columns) == ["lang"]


@pytest.mark.parametrize("write", [as_parquet, as_jsonl])
def test_a_columns_own_values_count_more_than_its_folders(
    tmp_path: Path, plan_of: PlanOf, carried_all: CarriedAll, write: Callable[[Path, int], None]
) -> None:
    write_folders(tmp_path / "in", ["month=01", "month=02", "prompt=x"], write)
    rows = carried_all(plan_of(tmp_path / "in"))
    assert rows == [
        {"prompt": "p0", "month": "01"}, {"prompt": "p1", "month": "02"}, {"prompt": "p2", "month": None},
    ]  # fmt: skip


def test_a_job_that_did_not_know_folders_goes_on_without_them(tmp_path: Path, plan_of: PlanOf) -> None:
    write_folders(tmp_path / "in", ["lang=de", "lang=fr"], as_parquet)
    plan = plan_of(tmp_path / "in").plan
    schema = pa.ipc.read_schema(pa.py_buffer(plan.arrow_schema))
    old = pa.schema([field.remove_metadata() for field in schema])
    from dataclasses import replace

    reader = InputReader(replace(plan, arrow_schema=old.serialize().to_pybytes()))
    assert reader.carried(plan.chunks[0]).column("lang").to_pylist() == [None, None]


def test_new_folders_of_a_job_keep_its_types(tmp_path: Path, plan_of: PlanOf) -> None:
    write_folders(tmp_path / "in", ["year=a"], as_parquet)
    plan = plan_of(tmp_path / "in").plan
    write_folders(tmp_path / "in", ["year=2024"], as_parquet)
    new = detect(str(tmp_path / "in/year=2024/part-0.parquet"))
    extension = plan_extension(JobSpec(input=(str(tmp_path),)), plan, [new]).plan
    from dataclasses import replace

    reader = InputReader(replace(plan, files=plan.files + extension.files, chunks=plan.chunks + extension.chunks))
    assert reader.carried(extension.chunks[0]).column("year").to_pylist() == ["2024"]


def test_a_jsonl_column_that_folders_and_rows_give(tmp_path: Path, plan_of: PlanOf, carried_all: CarriedAll) -> None:
    lines = ['{"a": 1, "t": "x", "b": true}', '{"t": "y"}']

    def write(path: Path, index: int) -> None:
        path.with_suffix(".jsonl").write_text(lines[index])

    write_folders(tmp_path / "in", ["a=5/t=7/b=9", "a=6/t=8/b=\udcff"], write)
    result = plan_of(tmp_path / "in")
    assert dict(result.plan.columns) == {"a": "int64", "t": "string", "b": "json"}
    assert carried_all(result) == [{"a": 1, "t": "x", "b": "true"}, {"a": 6, "t": "y", "b": '"\ufffd"'}]
