"""Arrow values as strict JSON text, for `merge` to JSONL. What JSON cannot say is said by these rules:

* integers have all their digits; floats are the shortest text that reads back equal; NaN and infinities are the strings
  "NaN", "Infinity" and "-Infinity", so that they stay apart from null;
* binary is a base64 string; decimal a string with all its digits;
* dates, times and timestamps are ISO 8601 strings with the digits of their unit, in UTC with a Z if they have a zone;
  durations are ISO 8601 (PT1.5S);
* a map is a list of {"key": ..., "value": ...}, since its keys need not be strings or unique; a struct is an object;
* a carried column that holds JSON text gives that text, byte for byte.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable
from datetime import date, timedelta
from json.encoder import encode_basestring
from typing import Any

import pyarrow as pa

from batchjob.store.schema import JSON_MARK

_UNITS = {"s": 0, "ms": 3, "us": 6, "ns": 9}
_EPOCH = date(1970, 1, 1)
_DAY = 86_400
_INT64_TIMES = (pa.types.is_timestamp, pa.types.is_duration, pa.types.is_time64, pa.types.is_date64)

Convert = Callable[[Any], Any]


def row_texts(table: pa.Table | pa.RecordBatch) -> list[str]:
    """One JSON object per row, without newlines between."""
    cells = [
        [f"{encode_basestring(field.name)}:{text}" for text in column_texts(table.column(i), field)]
        for i, field in enumerate(table.schema)
    ]
    return ["{" + ",".join(row) + "}" for row in zip(*cells, strict=True)]


def column_texts(column: pa.Array | pa.ChunkedArray, field: pa.Field) -> list[str]:
    """The JSON text of every value of a column."""
    kind = field.type
    if (field.metadata or {}).get(b"batchjob.json") == JSON_MARK[b"batchjob.json"]:
        return ["null" if value is None else value for value in column.to_pylist()]
    if pa.types.is_integer(kind):
        return ["null" if value is None else str(value) for value in column.to_pylist()]
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return ["null" if value is None else encode_basestring(value) for value in column.to_pylist()]
    plain = plain_type(kind)
    values = (column if plain == kind else column.cast(plain)).to_pylist()
    convert = converter(kind)
    if convert is not None:
        values = [None if value is None else convert(value) for value in values]
    dump = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode
    return [dump(value) for value in values]


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The type to cast to before values become Python's: times as their integers, which have no range to leave."""
    if any(test(kind) for test in _INT64_TIMES):
        return pa.int64()
    if pa.types.is_time32(kind) or pa.types.is_date32(kind):
        return pa.int32()
    if pa.types.is_float16(kind):
        return pa.float32()
    if pa.types.is_dictionary(kind):
        return plain_type(kind.value_type)
    if pa.types.is_map(kind):
        return pa.map_(plain_type(kind.key_type), plain_type(kind.item_type))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(plain_type(field.type)) for field in kind])
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(plain_type(kind.value_type)))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_type(plain_type(kind.value_type)), kind.list_size)
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(plain_type(kind.value_type)))
    return kind


def converter(kind: pa.DataType) -> Convert | None:
    """What makes a value of `plain_type(kind)`, not None, into one that JSON has; None if it is one already."""
    if pa.types.is_floating(kind):
        return _float
    if pa.types.is_decimal(kind):
        return lambda value: format(value, "f")
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return lambda value: base64.b64encode(value).decode()
    if pa.types.is_timestamp(kind):
        zone = "Z" if kind.tz else ""
        return lambda value: _timestamp(value, kind.unit) + zone
    if pa.types.is_date32(kind):
        return _date
    if pa.types.is_date64(kind):
        return lambda value: _date(value // (_DAY * 1000))
    if pa.types.is_time(kind):
        return lambda value: _time(value, kind.unit)
    if pa.types.is_duration(kind):
        return lambda value: _duration(value, kind.unit)
    if pa.types.is_dictionary(kind):
        return converter(kind.value_type)
    if pa.types.is_map(kind):
        key, item = _or_same(converter(kind.key_type)), _or_same(converter(kind.item_type))
        return lambda pairs: [{"key": key(k), "value": item(v)} for k, v in pairs]
    if pa.types.is_struct(kind):
        converters = {field.name: _or_same(converter(field.type)) for field in kind}
        return lambda value: {name: converters[name](part) for name, part in value.items()}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        item = _or_same(converter(kind.value_type))
        return lambda values: [item(value) for value in values]
    return None


def _or_same(convert: Convert | None) -> Convert:
    if convert is None:
        return lambda value: value
    return lambda value: None if value is None else convert(value)


def _float(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _split(value: int, unit: str) -> tuple[int, str]:
    """Whole seconds, rounded down, and the fraction with the digits of the unit."""
    digits = _UNITS[unit]
    seconds, rest = divmod(value, 10**digits)
    return seconds, f".{rest:0{digits}d}" if digits else ""


def _date(days: int) -> str:
    try:
        return (_EPOCH + timedelta(days=days)).isoformat()
    except OverflowError:  # outside the years 1 to 9999: ISO 8601 wants a sign there
        cycles, rest = divmod(days, 146_097)  # the calendar repeats every 400 years
        near = _EPOCH + timedelta(days=rest)
        year = near.year + 400 * cycles
        return f"{'-' if year < 0 else '+'}{abs(year):06d}{near.isoformat()[4:]}"


def _time(value: int, unit: str) -> str:
    seconds, fraction = _split(value, unit)
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}{fraction}"


def _timestamp(value: int, unit: str) -> str:
    seconds, fraction = _split(value, unit)
    days, seconds = divmod(seconds, _DAY)
    return f"{_date(days)}T{_time(seconds, 's')}{fraction}"


def _duration(value: int, unit: str) -> str:
    seconds, fraction = _split(abs(value), unit)
    return f"{'-' if value < 0 else ''}PT{seconds}{fraction.rstrip('0').rstrip('.')}S"
