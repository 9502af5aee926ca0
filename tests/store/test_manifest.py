"""job.json, the plan file and the schema that a job pins."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pyarrow as pa
import pytest

from batchjob.errors import InputDataError, StorageError, UsageError
from batchjob.plan import Chunk, InputFile, JobPlan, Segment
from batchjob.store import Manifest, check_column_names
from batchjob.store.columns import OWN_COLUMNS, OutputColumns
from batchjob.store.plan_files import plan_from_bytes, plan_to_bytes


def test_a_manifest_comes_back_as_it_was(kit: Any) -> None:
    manifest = kit.make_manifest(
        kit.make_plan(10, 5),
        spec={"stop": ("a", "b"), "prompt": "é\udcff"},
        resolved={"model": {"revision": "abc"}},
        num_samples=3,
        columns=OutputColumns(["output_token_ids"]),
    ).with_setup(link_method="link", plan_digest="d")
    again = Manifest.from_bytes(manifest.to_bytes(), source="job.json")
    assert again == manifest
    assert again.arrow_schema == manifest.arrow_schema
    assert again.fingerprint_digest == manifest.fingerprint_digest
    assert "output_token_ids" in json.loads(manifest.to_bytes().decode("utf-8", "surrogatepass"))["columns"]


def test_every_field_of_a_manifest_is_needed_to_read_it(kit: Any) -> None:
    data = json.loads(kit.make_manifest(kit.make_plan(1, 1)).to_bytes())
    assert set(data) == {field.name for field in fields(Manifest)} | {"columns"}
    for name in ("job_id", "fingerprint", "schema", "format_version"):
        less = {key: value for key, value in data.items() if key != name}
        with pytest.raises(StorageError, match="damaged"):
            Manifest.from_bytes(json.dumps(less).encode(), source="job.json")


@pytest.mark.parametrize(
    ("old", "new", "lines"),
    [
        ({"a": 1}, {"a": 1}, []),
        ({"a": (1, 2)}, {"a": [1, 2]}, []),
        ({"a": 1}, {"a": 2}, ["a: 1 → 2"]),
        ({"a": 0.0}, {"a": 0}, ["a: 0.0 → 0"]),
        ({"a": 1}, {"a": True}, ["a: 1 → true"]),
        ({"a": None}, {}, ["a: null → (not set)"]),
        ({}, {"a": "é"}, ['a: (not set) → "é"']),
        ({"s": {"t": 1, "u": 2}}, {"s": {"t": 1, "u": 3}}, ["s.u: 2 → 3"]),
        ({"b": 1, "a": 1}, {"b": 2, "a": 2}, ["a: 1 → 2", "b: 1 → 2"]),
        ({"s": {}}, {"s": {"t": 1}}, ["s: {} → (not set)", "s.t: (not set) → 1"]),
    ],
)
def test_differences_are_told_by_name(kit: Any, old: dict[str, Any], new: dict[str, Any], lines: list[str]) -> None:
    plan = kit.make_plan(1, 1)
    first, second = kit.make_manifest(plan, fingerprint=old), kit.make_manifest(plan, fingerprint=new)
    assert first.diff(second) == lines
    assert (first.fingerprint_digest == second.fingerprint_digest) == (not lines)


def test_long_values_are_shortened_and_the_shape_of_the_output_counts(kit: Any) -> None:
    plan = kit.make_plan(1, 1)
    first = kit.make_manifest(plan, fingerprint={"template": "x" * 1000})
    second = kit.make_manifest(
        plan, fingerprint={"template": "y" * 1000}, num_samples=2, columns=OutputColumns(["output_token_ids"])
    )
    lines = first.diff(second)
    assert [line.split(":")[0] for line in lines] == ["template", "num_samples"]
    assert len(lines[0]) < 500


def test_a_plan_comes_back_as_it_was() -> None:
    schema = pa.schema([("a", pa.int64()), ("b", pa.list_(pa.string()))], metadata={"k": "v"})
    plan = JobPlan(
        files=(
            InputFile("/x/\udcff é.jsonl", "jsonl", "gz", 2**50, 2**60, 3, "d"),
            InputFile("/y.jsonl", "jsonl", "", 0, 0, 2, ""),
        ),
        chunks=(
            Chunk(0, 0, 4, (Segment(0, 0, 3), Segment(1, 0, 1, byte_offset=5, line=7))),
            Chunk(1, 4, 1, (Segment(1, 1, 1, byte_offset=2**45, line=2**40),)),
        ),
        columns={"b": "json", "a": "int64"},
        arrow_schema=schema.serialize().to_pybytes(),
    )
    again = plan_from_bytes(plan_to_bytes(plan))
    assert again == plan
    assert list(again.columns) == ["b", "a"]
    empty = JobPlan((), (), {}, b"")
    assert plan_from_bytes(plan_to_bytes(empty)) == empty
    with pytest.raises(ValueError, match=r"Not an Arrow file|too small"):
        plan_from_bytes(b"not a plan")


@pytest.mark.parametrize("name", OWN_COLUMNS)
def test_a_carried_column_with_a_name_of_ours_is_refused_with_a_way_out(kit: Any, name: str) -> None:
    schema = pa.schema([("a", pa.string()), (name, pa.string()), ("b", pa.string())])
    with pytest.raises(UsageError, match="--keep-columns 'a,b'") as caught:
        kit.make_manifest(kit.make_plan(1, 1, schema))
    assert repr(name) in str(caught.value)


def test_names_that_come_twice_are_refused() -> None:
    check_column_names(["a", "b"])
    with pytest.raises(UsageError, match="several columns named 'a'"):
        check_column_names(["a", "b", "a"])


def test_a_type_that_parquet_cannot_hold_is_found_at_the_start(kit: Any) -> None:
    for kind in (pa.month_day_nano_interval(), pa.struct([])):
        with pytest.raises(InputDataError, match=r"'odd' of type .* cannot be stored"):
            kit.make_manifest(kit.make_plan(1, 1, pa.schema([("odd", kind)])))


def test_the_output_schema(kit: Any) -> None:
    schema = pa.schema(
        [pa.field("a", pa.int64(), nullable=False, metadata={"unit": "m"}), pa.field("j", pa.string())],
        metadata={"pandas": "{}", "other": "kept"},
    )
    made = kit.make_manifest(
        kit.make_plan(1, 1, schema, {"a": "parquet", "j": "json"}), columns=OutputColumns(["output_token_ids"])
    ).arrow_schema
    assert made.names == [
        "row_index",
        "sample_index",
        "a",
        "j",
        "status",
        "output",
        "finish_reason",
        "num_prompt_tokens",
        "num_output_tokens",
        "error_type",
        "error_message",
        "output_token_ids",
    ]
    assert made.metadata == {b"other": b"kept"}, "pandas' own metadata describes another table"
    assert made.field("a") == schema.field("a")
    assert made.field("a").metadata == {b"unit": b"m"}
    assert made.field("j").metadata == {b"batchjob.json": b"true"}
