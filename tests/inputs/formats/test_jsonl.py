"""One line to one row, types over a whole input, values as they were written."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchjob.inputs.formats.column_types import ColumnTypes
from batchjob.inputs.formats.jsonl import parse_row, raw_values

HALF = "\\ud83d"


@pytest.mark.parametrize(
    ("raw", "kind", "words"),
    [
        (b'{"a": 1', "invalid_json", "character 8"),
        (b'{"a": 1} tail', "invalid_json", "Extra data"),
        (b'{"a": 1}{"a": 2}', "invalid_json", "Extra data"),
        (b"[1, 2]", "invalid_json", "a list"),
        (b'"text"', "invalid_json", "not a JSON object"),
        (b"null", "invalid_json", "not a JSON object"),
        (b'{"a": NaN}', "invalid_json", "NaN is not JSON"),
        (b'{"a": -Infinity}', "invalid_json", "-Infinity is not JSON"),
        (b"\x00\x00\x00", "invalid_json", "not JSON"),
        (b'{"a": ' + b"1" * 5000 + b"}", "invalid_json", "not readable"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "invalid_json", "nested more than 256 deep"),
        (b'{"a": "\xff"}', "invalid_encoding", "byte 8 "),
        (b'{"a": "caf\xe9"}', "invalid_encoding", "not UTF-8"),
    ],
)
def test_what_is_no_row_says_why(raw: bytes, kind: str, words: str) -> None:
    row, error = parse_row(raw)
    assert row is None
    assert error is not None
    assert error.type == kind
    assert words in error.message


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b'{"a": 1}\r', {"a": 1}),
        (b' {"a": 1} ', {"a": 1}),
        (b'{"a": 1, "a": 2}', {"a": 2}),
        (b"{}", {}),
        (b'{"a": "\\ud83d\\ude42"}', {"a": "\U0001f642"}),
        (b'{"a": "\\\\ud83d"}', {"a": "\\ud83d"}),
        (b'{"a": ' + b"9" * 400 + b"}", {"a": 10**400 - 1}),
        ('{"a": "x\u2028y\u0085z"}'.encode(), {"a": "x\u2028y\u0085z"}),
    ],
)
def test_rows_that_look_odd_but_are_fine(raw: bytes, expected: dict[str, Any]) -> None:
    assert parse_row(raw) == (expected, None)


@pytest.mark.parametrize(
    ("raw", "column", "mended"),
    [
        (f'{{"a": "x {HALF} y"}}', "a", {"a": "x \ufffd y"}),
        ('{"a": "\\ude42\\ud83d"}', "a", {"a": "\ufffd\ufffd"}),
        (f'{{"b": 1, "a": {{"k": ["{HALF}"]}}}}', "a", {"b": 1, "a": {"k": ["\ufffd"]}}),
        (f'{{"b": 1, "k{HALF}": 2}}', "k\ufffd", {"b": 1, "k\ufffd": 2}),
    ],
)
def test_half_of_a_surrogate_pair_is_a_row_error_with_mended_values(
    raw: str, column: str, mended: dict[str, Any]
) -> None:
    row, error = parse_row(raw.encode())
    assert row == mended
    assert error is not None
    assert error.type == "invalid_encoding"
    assert repr(column) in error.message
    json.dumps([row, error.message], ensure_ascii=False).encode()  # nothing that UTF-8 cannot hold


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1, None, -(2**63), 2**63 - 1], "int64"),
        ([1, 2**63], "json"),
        ([-(2**63) - 1], "json"),
        ([0.5, None, 1e300], "double"),
        ([1, 0.5], "json"),
        ([math.inf], "json"),  # what 1e999 reads as
        ([True, False], "bool"),
        ([True, 1], "json"),
        (["a", None], "string"),
        (["a", 1], "json"),
        ([None, None], "string"),
        ([[1]], "json"),
        ([{"x": 1}, None], "json"),
    ],
)
def test_a_column_gets_a_type_only_if_every_row_has_it(values: list[Any], kind: str) -> None:
    for ordered in (values, values[::-1]):
        types = ColumnTypes()
        for value in ordered:
            types.add({"c": value})
        assert types.kinds() == {"c": kind}


def test_columns_come_in_order_of_first_appearance() -> None:
    types = ColumnTypes()
    for row in ({"b": 1}, {"a": "x", "b": 2}, {"c": None, "a": "y"}):
        types.add(row)
    assert list(types.kinds().items()) == [("b", "int64"), ("a", "string"), ("c", "string")]


def test_values_keep_the_form_in_which_they_were_written() -> None:
    text = ' { "a" : 7.0 ,"b":1e2, "c":[ 1,  2 ],"d":"\\u00e9","e":null, "a\\u0062": -0.0, "f":{"x": "}"} }'
    assert raw_values(text, ["a", "b", "c", "d", "e", "ab", "f", "absent"]) == {
        "a": "7.0",
        "b": "1e2",
        "c": "[ 1,  2 ]",
        "d": '"\\u00e9"',
        "ab": "-0.0",
        "f": '{"x": "}"}',
    }


def test_of_a_key_given_twice_the_last_value_counts() -> None:
    assert raw_values('{"a": 1, "a": 2.50}', ["a"]) == {"a": "2.50"}
    assert raw_values('{"a": 1, "a": null}', ["a"]) == {}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), JSON, max_size=5), st.sampled_from([None, 1]), st.booleans())
def test_raw_values_agree_with_the_parser(row: dict[str, Any], indent: int | None, ascii_only: bool) -> None:
    text = json.dumps(row, indent=indent, ensure_ascii=ascii_only).replace("\n", " ")
    parsed, _ = parse_row(text.encode(errors="surrogatepass"))
    found = raw_values(text, row)
    assert {key: json.loads(value) for key, value in found.items()} == {k: v for k, v in row.items() if v is not None}
    assert parsed is None or parsed.keys() == row.keys()
