"""Arrow values as strict JSON, by the rules that the module states."""

from __future__ import annotations

import json
import math
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from batchjob.store.jsontext import column_texts, row_texts
from batchjob.store.schema import JSON_MARK

UTC = UTC


def strict(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(constant)

    return json.loads(text, parse_constant=refuse)


def texts(kind: pa.DataType, values: list[Any]) -> list[str]:
    return column_texts(pa.chunked_array([pa.array(values, kind)]), pa.field("x", kind))


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        (pa.int64(), [2**53 + 1, -(2**63), None], ["9007199254740993", "-9223372036854775808", "null"]),
        (pa.uint64(), [2**64 - 1], ["18446744073709551615"]),
        (pa.int8(), [-1], ["-1"]),
        (pa.bool_(), [True, False, None], ["true", "false", "null"]),
        (pa.null(), [None], ["null"]),
        (pa.float64(), [0.1, 7.0, 1e300, -0.0, None], ["0.1", "7.0", "1e+300", "-0.0", "null"]),
        (pa.float64(), [math.nan, math.inf, -math.inf], ['"NaN"', '"Infinity"', '"-Infinity"']),
        (pa.float32(), [0.5, math.nan], ["0.5", '"NaN"']),
        (pa.string(), ['a"\n\u2028é\0', None], ['"a\\"\\n\u2028é\\u0000"', "null"]),
        (pa.large_string(), ["x"], ['"x"']),
        (pa.dictionary(pa.int8(), pa.string()), ["a", None, "a"], ['"a"', "null", '"a"']),
        (pa.binary(), [b"\0\xff", None], ['"AP8="', "null"]),
        (pa.large_binary(), [b""], ['""']),
        (pa.binary(2), [b"ab"], ['"YWI="']),
        (pa.decimal128(12, 2), [Decimal("1.50"), Decimal("-1234567890.10")], ['"1.50"', '"-1234567890.10"']),
        (pa.decimal128(5, -3), [Decimal("12000")], ['"12000"']),
        (pa.date32(), [date(2024, 2, 29), None], ['"2024-02-29"', "null"]),
        (pa.date64(), [date(1969, 12, 31)], ['"1969-12-31"']),
        (pa.time32("s"), [time(1, 2, 3)], ['"01:02:03"']),
        (pa.time64("us"), [time(23, 59, 59, 1)], ['"23:59:59.000001"']),
        (pa.timestamp("s"), [datetime(2024, 1, 2, 3, 4, 5)], ['"2024-01-02T03:04:05"']),
        (pa.timestamp("us"), [datetime(1969, 12, 31, 23, 59, 59, 999999)], ['"1969-12-31T23:59:59.999999"']),
        (pa.timestamp("ms", "UTC"), [datetime(2024, 1, 2, tzinfo=UTC)], ['"2024-01-02T00:00:00.000Z"']),
        (pa.duration("ms"), [timedelta(seconds=1.5), timedelta(seconds=-2)], ['"PT1.5S"', '"-PT2S"']),
        (pa.list_(pa.float64()), [[1.0, math.nan, None], [], None], ['[1.0,"NaN",null]', "[]", "null"]),
        (pa.list_(pa.int8(), 2), [[1, 2]], ["[1,2]"]),
        (pa.large_list(pa.date32()), [[date(2024, 1, 1)]], ['["2024-01-01"]']),
        (
            pa.struct([("t", pa.timestamp("us")), ("b", pa.binary())]),
            [{"t": datetime(2024, 1, 1), "b": None}, None],
            ['{"t":"2024-01-01T00:00:00.000000","b":null}', "null"],
        ),
        (
            pa.list_(pa.struct([("d", pa.decimal128(3, 1))])),
            [[{"d": Decimal("1.0")}, None]],
            ['[{"d":"1.0"},null]'],
        ),
        (
            pa.map_(pa.string(), pa.int64()),
            [[("a", 1), ("a", None)]],
            ['[{"key":"a","value":1},{"key":"a","value":null}]'],
        ),
        (pa.map_(pa.int8(), pa.float64()), [[(1, math.inf)]], ['[{"key":1,"value":"Infinity"}]']),
    ],
)
def test_values_by_type(kind: pa.DataType, values: list[Any], expected: list[str]) -> None:
    assert texts(kind, values) == expected
    for text in expected:
        strict(text)


UUID_TEXT = "12345678-9abc-def0-1234-56789abcdef0"
AT = [1_700_000_000_000_000, None]
TIMES = pa.array(AT, pa.timestamp("us"))
UUIDS = pa.ExtensionArray.from_storage(
    pa.uuid(), pa.array([bytes.fromhex(UUID_TEXT.replace("-", "")), None], pa.binary(16))
)
AT_TEXT = '"2023-11-14T22:13:20.000000"'


LISTS = (pa.ListArray, pa.LargeListArray, pa.ListViewArray, pa.LargeListViewArray)


def listed(values: pa.Array, kind: Any) -> pa.Array:
    """[[both values], null, [], [the first]]"""
    integers = pa.int64() if "Large" in kind.__name__ else pa.int32()
    offsets = pa.array([0, 2, 2, 2, 3], integers)
    mask = pa.array([False, True, False, False])
    values = pa.concat_arrays([values, values[:1]])
    if "View" in kind.__name__:
        return kind.from_arrays(offsets[:-1], pa.array([2, 0, 0, 1], integers), values, mask=mask)
    return kind.from_arrays(offsets, values, mask=mask)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (UUIDS, [f'"{UUID_TEXT}"', "null"]),
        (pa.array([b"\0\xff", None], pa.binary_view()), ['"AP8="', "null"]),
        (pa.array(["a", None], pa.string_view()), ['"a"', "null"]),
        (pa.array(['{"a":1}', None], pa.json_()), ['"{\\"a\\":1}"', "null"]),
        (pa.ExtensionArray.from_storage(pa.bool8(), pa.array([3, None], pa.int8())), ["true", "null"]),
        (TIMES.dictionary_encode(), [AT_TEXT, "null"]),
        (pc.run_end_encode(TIMES), [AT_TEXT, "null"]),
        (pa.array([True, None], pa.bool_()), ["true", "null"]),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else "",
)
@pytest.mark.parametrize("kind", [None, *LISTS, "struct", "map"])
def test_every_type_alone_and_in_others_and_in_a_slice(values: pa.Array, expected: list[str], kind: Any) -> None:
    one, two = expected
    if kind == "struct":
        values = pa.StructArray.from_arrays([values], ["s"], mask=pa.array([False, True]))
        expected = [f'{{"s":{one}}}', "null"]
    elif kind == "map":
        values = pa.MapArray.from_arrays([0, 1, 2], ["a", "b"], values)
        expected = [f'[{{"key":"a","value":{one}}}]', f'[{{"key":"b","value":{two}}}]']
    elif kind is not None:
        values = listed(values, kind)
        expected = [f"[{one},{two}]", "null", "[]", f"[{one}]"]
    field = pa.field("x", values.type)
    assert column_texts(values, field) == expected
    assert column_texts(pa.chunked_array([values[1:], values[:1]]), field) == [*expected[1:], expected[0]]


def test_nanoseconds_and_years_that_python_has_not() -> None:
    values = pa.array([1_700_000_000_123_456_789, -1], pa.int64()).cast(pa.timestamp("ns", "Europe/Zurich"))
    assert column_texts(values, pa.field("x", values.type)) == [
        '"2023-11-14T22:13:20.123456789Z"',
        '"1969-12-31T23:59:59.999999999Z"',
    ]
    far = pa.array([2**31 - 1, -(2**31), 4 * 146_097 * 25], pa.int32()).cast(pa.date32())
    assert column_texts(far, pa.field("x", far.type)) == ['"+5881580-07-11"', '"-5877641-06-23"', '"+041970-01-01"']


def test_a_column_of_json_text_is_written_as_it_is() -> None:
    field = pa.field("x", pa.string(), metadata=JSON_MARK)
    values = ['{"a": 1,  "b": [18446744073709551616, 1.50]}', '"007"', "7", "7.0", "null", None]
    assert column_texts(pa.array(values), field) == [*values[:-1], "null"]


def test_rows_are_single_lines_of_strict_json() -> None:
    schema = pa.schema([pa.field('na"me\n', pa.string()), pa.field("f", pa.float64())])
    table = pa.table([["a\nb", None], [math.nan, 2.0]], schema=schema)
    lines = row_texts(table)
    assert all("\n" not in line for line in lines)
    assert [strict(line) for line in lines] == [{'na"me\n': "a\nb", "f": "NaN"}, {'na"me\n': None, "f": 2.0}]
    assert row_texts(schema.empty_table()) == []
