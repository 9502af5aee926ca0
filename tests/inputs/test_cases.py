"""Inputs of the kinds that made other batch programs fail, each with its right behaviour."""

from __future__ import annotations

import datetime as dt
import decimal
import gzip
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchjob.inputs.planner import PlanResult
from batchjob.inputs.reader import InputReader
from batchjob.records import Record

PlanOf = Callable[..., PlanResult]
ReadAll = Callable[..., list[Record]]
CarriedAll = Callable[[PlanResult], list[dict[str, Any]]]
Write = Callable[[str, bytes], Path]


def restored(result: PlanResult, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Carried rows as JSON values again, nulls left out: what a merge to JSONL writes."""
    kinds = result.plan.columns
    return [
        {
            name: json.loads(value) if kinds[name] == "json" else value
            for name, value in row.items()
            if value is not None
        }
        for row in rows
    ]


def test_a_column_whose_type_changes_from_row_to_row(write: Write, plan_of: PlanOf, carried_all: CarriedAll) -> None:
    rows: list[dict[str, Any]] = [
        {"id": "a1", "prompt": "Go.", "note": "012", "marks": ["p", "q"], "spans": [[0, 3, "Verb"]]},
        {"id": "a2", "prompt": "Go.", "note": 12, "marks": [], "spans": []},
        {"id": "a3", "prompt": "Go.", "note": 12.0, "marks": [2, "q", None]},
        {"id": "a4", "prompt": "Go.", "note": {"deep": [1, {"er": None}]}, "marks": "p,q"},
        {"id": "a5", "prompt": "Go.", "note": [0, "y"], "marks": [[["d"]]]},
        {"id": "a6", "prompt": "Go.", "note": False},
        {"id": "a7", "prompt": "Go.", "rare": "here only"},
        {"id": 12, "prompt": "Go.", "note": "end"},
    ]
    result = plan_of(write("a.jsonl", "\n".join(map(json.dumps, rows)).encode()))
    back = restored(result, carried_all(result))
    assert back == rows
    assert [type(row.get("note")) for row in back] == [type(row.get("note")) for row in rows]  # 12 is not 12.0
    assert [row["id"] for row in back].count(12) == 1
    assert result.plan.columns["prompt"] == "string"


def test_unicode_line_separators_inside_strings(write: Write, plan_of: PlanOf, read_all: ReadAll) -> None:
    rows = [
        {"prompt": "up\u0085down", "note": "raw"},
        {"prompt": "up\u2028down", "note": "raw"},
        {"prompt": "up\u2029down", "note": "c\u2029d"},
        {"prompt": "a\tb\rc\x0bd\x0ce\x1cf", "note": "escapes"},
    ]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    lines.append('{"prompt": "up\\u2028down", "note": "escaped"}')
    result = plan_of(write("a.jsonl", "\n".join(lines).encode()))
    records = read_all(result, ["prompt"])
    assert [r.error for r in records] == [None] * 5
    assert [r.fields["prompt"] for r in records] == [*(row["prompt"] for row in rows), "up\u2028down"]
    assert records[1].fields == records[4].fields


def test_half_of_a_surrogate_pair_anywhere(
    write: Write, plan_of: PlanOf, read_all: ReadAll, carried_all: CarriedAll
) -> None:
    lines = [
        r'{"id":"ok","prompt":"hi \ud83d\ude42!"}',
        r'{"id":"high","prompt":"hi \ud83d!"}',
        r'{"id":"low","prompt":"hi \ude42!"}',
        r'{"id":"turned","prompt":"hi \ude42\ud83d!"}',
        r'{"id":"carried","prompt":"hi","origin":"p. \udc80 x"}',
        r'{"id":"deep","prompt":"hi","extra":{"list":["\ud801"]}}',
        r'{"id":"key","prompt":"hi","x\udfff":true}',
        r'{"id":"id \ud800","prompt":"hi"}',
        r'{"id":"end","prompt":"hi"}',
    ]
    result = plan_of(write("a.jsonl", "\n".join(lines).encode()))
    records = read_all(result, ["prompt"])
    assert records[0].fields["prompt"] == "hi \U0001f642!"
    assert [r.error.type if r.error else None for r in records] == [None, *["invalid_encoding"] * 7, None]
    for error in (r.error for r in records if r.error):
        error.message.encode()
    rows = carried_all(result)
    assert len(rows) == 9
    assert rows[1]["prompt"] == "hi \ufffd!"
    assert rows[7]["id"] == "id \ufffd"
    reader = InputReader(result.plan)
    pq.write_table(reader.carried(result.plan.chunks[0]), pa.BufferOutputStream())
    json.dumps(rows, ensure_ascii=False).encode()


ODD_FILE = b"\r\n".join(
    [
        b'\xef\xbb\xbf{"id":"n1","prompt":"One."}',
        b"",
        b'{"id":"n2","prompt":"Two.","x":"y"}',
        b" \t ",
        b'{"id":"n3","prompt":"Three."}',
    ]
)
BROKEN_FILE = b"\n".join(
    [
        b'{"id":"g1","prompt":"One."}',
        b"",
        b'{"id":"b1","prompt":"Tw',
        b'{"id":"g2","prompt":"Two."}',
        b"[true]",
        b'"words"',
        b'{"id":"b2","prompt":"x"} more',
        b'{"id":"b3","prompt":"na\xefve"}',
        b'{"id":"g3","prompt":"Three."}',
    ]
)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_byte_order_mark_crlf_blank_lines_and_no_last_newline(
    write: Write, plan_of: PlanOf, read_all: ReadAll, carried_all: CarriedAll, name: str
) -> None:
    result = plan_of(write(name, ODD_FILE), chunk_rows=2)
    assert [r.fields for r in read_all(result)] == [
        {"id": "n1", "prompt": "One."},
        {"id": "n2", "prompt": "Two.", "x": "y"},
        {"id": "n3", "prompt": "Three."},
    ]
    assert [row["id"] for row in carried_all(result)] == ["n1", "n2", "n3"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_broken_lines_are_named_by_their_physical_line(
    write: Write, plan_of: PlanOf, read_all: ReadAll, name: str
) -> None:
    path = write(name, BROKEN_FILE)
    result = plan_of(path)
    records = read_all(result, ["id"])
    assert [r.fields["id"] for r in records if r.error is None] == ["g1", "g2", "g3"]
    assert [r.where for r in records if r.error] == [f"{path}:{line}" for line in (3, 5, 6, 7, 8)]
    assert all(r.error.message.startswith(r.where) for r in records if r.error)
    assert result.num_bad_rows == 5


def test_big_numbers_come_back_exact(write: Write, plan_of: PlanOf, carried_all: CarriedAll) -> None:
    texts = ["9007199254740995", "null", "17", "18446744073709551617", "-9223372036854775808"]
    prices = ["0.3", "2e3", "200", "4.0", "2.50"]
    lines = [
        f'{{"n":{n},"price":{price},"fits":{n if len(n) < 19 else 1}}}' for n, price in zip(texts, prices, strict=True)
    ]
    result = plan_of(write("a.jsonl", "\n".join(lines).encode()))
    assert dict(result.plan.columns) == {"n": "json", "price": "json", "fits": "int64"}
    rows = carried_all(result)
    assert [row["n"] for row in rows] == [None if text == "null" else text for text in texts]
    assert [row["price"] for row in rows] == prices
    assert rows[0]["fits"] == 9007199254740995


def all_types() -> pa.Table:
    """Every kind of column a person may carry along, with nulls, NaN and the ends of ranges."""
    turns = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    now = dt.datetime(2024, 2, 29, 12, 30, 1, 234567)
    columns = {
        "prompt": pa.array(["a", "b", "c", "d"]),
        "int": pa.array([2**62 + 1, None, -(2**63), 0], pa.int64()),
        "uint": pa.array([2**64 - 1, None, 0, 1], pa.uint64()),
        "small": pa.array([-128, None, 127, 0], pa.int8()),
        "real": pa.array([0.1, math.nan, None, math.inf], pa.float64()),
        "half": pa.array([0.1, math.nan, None, 2.0], pa.float32()),
        "flag": pa.array([True, None, False, True]),
        "utc": pa.array([now, None, now, now], pa.timestamp("us", tz="UTC")),
        "nano": pa.array([1_700_000_000_123_456_789, None, 0, 1], pa.timestamp("ns")),
        "day": pa.array([dt.date(2024, 2, 29), None, dt.date(1900, 1, 1), dt.date(9999, 12, 31)]),
        "raw": pa.array([b"\x00\xff", None, b"", b"x"]),
        "money": pa.array(
            [decimal.Decimal("12345678901234567.89"), None, decimal.Decimal("-0.01"), 0], pa.decimal128(20, 2)
        ),
        "tags": pa.array([["x", None], None, [], ["y"]], pa.list_(pa.string())),
        "box": pa.array([{"x": 1, "y": None}, None, {"x": None, "y": "z"}, {"x": 2, "y": "w"}]),
        "turns": pa.array([[{"role": "user", "content": "hi"}], None, [], [{"role": None, "content": None}]], turns),
        "kind": pa.array(["p", None, "q", "p"]).dictionary_encode(),
        "large": pa.array(["p", None, "", "q"], pa.large_string()),
        "pairs": pa.array([[("a", 1)], None, [], [("b", None)]], pa.map_(pa.string(), pa.int64())),
        "nothing": pa.nulls(4),
    }
    return pa.table(columns).replace_schema_metadata({"owner": "somebody"})


@pytest.mark.parametrize("row_group_size", [1, 3, 4])
@pytest.mark.parametrize("chunk_rows", [1, 3, 4])
def test_parquet_columns_of_every_type_come_out_unchanged(
    tmp_path: Path, plan_of: PlanOf, row_group_size: int, chunk_rows: int
) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(all_types(), path, row_group_size=row_group_size)
    expected = pq.read_table(path)
    result = plan_of(path, chunk_rows=chunk_rows)
    reader = InputReader(result.plan)
    tables = [reader.carried(chunk) for chunk in result.plan.chunks]
    sink = pa.BufferOutputStream()
    pq.write_table(pa.concat_tables(tables), sink)  # and as Parquet again
    for found in (pa.concat_tables(tables), pq.read_table(sink.getvalue())):
        assert found.schema == expected.schema
        assert found.schema.metadata[b"owner"] == b"somebody"
        assert found.drop_columns(["real", "half"]).equals(expected.drop_columns(["real", "half"]))
        for name in ("real", "half"):  # NaN is not equal to itself
            assert str(found[name].to_pylist()) == str(expected[name].to_pylist())


def test_gzip_and_plain_form_give_the_same_plan(write: Write, plan_of: PlanOf) -> None:
    plain = plan_of(write("a.jsonl", BROKEN_FILE), chunk_rows=2).plan
    packed = plan_of(write("b.jsonl.gz", BROKEN_FILE), chunk_rows=2).plan
    assert plain.chunks == packed.chunks
    assert plain.columns == packed.columns
    assert gzip.decompress(Path(packed.files[0].path).read_bytes()) == BROKEN_FILE
