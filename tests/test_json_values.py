"""What a prompt gets of a Parquet value is what `merge` to JSONL writes of it, whatever its type."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchjob.inputs.planner import make_plan
from batchjob.inputs.reader import InputReader
from batchjob.prompts.forms import template_text
from batchjob.spec import JobSpec
from batchjob.store.jsontext import column_texts

FAR = 2**62  # no date of Python's
STRUCT = pa.struct([("price", pa.decimal128(5, 2)), ("day", pa.date32()), ("raw", pa.binary())])
CASES: list[tuple[pa.DataType, list[Any]]] = [
    (pa.decimal128(5, 2), [Decimal("1.10"), None]),
    (pa.date32(), [0, 2_932_897]),
    (pa.timestamp("us", "Europe/Berlin"), [0, FAR]),
    (pa.timestamp("ns"), [1, -FAR]),
    (pa.time64("us"), [1, None]),
    (pa.duration("s"), [90, FAR]),
    (pa.float64(), [float("nan"), float("-inf")]),
    (pa.list_(pa.decimal128(5, 2)), [[Decimal("2.00"), None], []]),
    (pa.list_(pa.binary()), [[b"\xff"], None]),
    (STRUCT, [{"price": Decimal("1.10"), "day": 0, "raw": b"\xff"}, None]),
    (pa.map_(pa.string(), pa.timestamp("us")), [[("a", FAR)], [("\u00e9", None), ("\u00e9", 1)]]),
    (pa.uuid(), [bytes(range(16)), None]),
]


@pytest.mark.parametrize(("kind", "values"), CASES, ids=[str(kind) for kind, _ in CASES])
def test_a_prompt_gets_what_merge_writes(tmp_path: Path, kind: pa.DataType, values: list[Any]) -> None:
    if isinstance(kind, pa.BaseExtensionType):
        column = pa.ExtensionArray.from_storage(kind, pa.array(values, kind.storage_type))
    else:
        column = pa.array(values, kind)
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"x": column}), path)
    plan = make_plan(JobSpec(input=(str(path),))).plan
    found = [record.fields["x"] for record in InputReader(plan).rows(plan.chunks[0], ["x"])]
    stored = pq.read_table(path).column("x")
    assert found == [json.loads(text) for text in column_texts(stored, pa.field("x", stored.type))]
    for value in found:
        if value is not None:
            text = template_text("x", value)
            assert text == value if isinstance(value, str) else json.loads(text) == value


def test_a_column_of_binary_data_is_never_taken_for_text(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"x": pa.array([b"text"], pa.binary())}), path)
    plan = make_plan(JobSpec(input=(str(path),))).plan
    assert [record.fields["x"] for record in InputReader(plan).rows(plan.chunks[0], ["x"])] == [b"text"]
