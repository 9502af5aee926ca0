"""Arrow values as JSON values, the same for `merge` to JSONL and for prompts. For values that JSON does not have:

* floats stay floats; NaN and infinities are the strings "NaN", "Infinity" and "-Infinity", apart from null;
* binary is a base64 string; decimal a string with all its digits;
* dates, times and timestamps are ISO 8601 strings with the digits of their unit, in UTC with a Z if they have a zone;
  durations are ISO 8601 (PT1.5S);
* a UUID is the usual text of 36 characters; any other extension type is what it is stored as;
* a map is a list of {"key": ..., "value": ...}, since its keys need not be strings or unique; a struct is an object.

No value becomes an object of Python's datetime or decimal on the way, so there is no range that it could leave.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from datetime import date, timedelta
from itertools import islice, pairwise
from typing import Any
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc

_UNITS = {"s": 0, "ms": 3, "us": 6, "ns": 9}
_EPOCH = date(1970, 1, 1)
_DAY = 86_400
_INT64_TIMES = (pa.types.is_timestamp, pa.types.is_duration, pa.types.is_time64, pa.types.is_date64)

Convert = Callable[[Any], Any]


def json_values(array: pa.Array) -> list[Any]:
    """The values as the types that `json` writes: None, bool, int, float, str, list, dict. Takes every type of a
    Parquet file."""
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return _extension_values(array)
    if pa.types.is_dictionary(kind):
        known = json_values(array.dictionary)
        return [None if index is None else known[index] for index in array.indices.to_pylist()]
    if pa.types.is_run_end_encoded(kind):
        return json_values(pc.run_end_decode(array))
    if pa.types.is_struct(kind):
        names = [field.name for field in kind]
        parts = zip(*map(json_values, array.flatten()), strict=True) if names else [()] * len(array)
        valid = array.is_valid().to_pylist()
        return [dict(zip(names, row, strict=True)) if there else None for row, there in zip(parts, valid, strict=True)]
    if pa.types.is_map(kind):
        return _map_values(array)
    if _is_list(kind):
        items = iter(json_values(array.flatten()))
        lengths = pc.list_value_length(array).to_pylist()
        return [None if length is None else list(islice(items, length)) for length in lengths]
    values = _plain(array).to_pylist()
    convert = _converter(kind)
    return values if convert is None else [None if value is None else convert(value) for value in values]


def _extension_values(array: pa.ExtensionArray) -> list[Any]:
    """The stored values of an extension type, unless its meaning is known."""
    name, values = array.type.extension_name, json_values(array.storage)
    if name == "arrow.uuid":
        stored = array.storage.to_pylist()
        return [None if value is None else str(UUID(bytes=value)) for value in stored]
    if name == "arrow.bool8":
        return [None if value is None else bool(value) for value in values]
    return values


def _map_values(array: pa.MapArray) -> list[Any]:
    offsets, valid = array.offsets.to_pylist(), array.is_valid().to_pylist()
    first, last = offsets[0], offsets[-1]
    keys, items = (json_values(part.slice(first, last - first)) for part in (array.keys, array.items))
    pairs = [{"key": key, "value": item} for key, item in zip(keys, items, strict=True)]
    return [
        pairs[start - first : stop - first] if there else None
        for (start, stop), there in zip(pairwise(offsets), valid, strict=True)
    ]


def is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_list(kind: pa.DataType) -> bool:
    types = pa.types
    tests = (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view, types.is_large_list_view)
    return any(test(kind) for test in tests)


def is_binary(kind: pa.DataType) -> bool:
    types = pa.types
    tests = (types.is_binary, types.is_large_binary, types.is_fixed_size_binary, types.is_binary_view)
    return any(test(kind) for test in tests)


def _plain(array: pa.Array) -> pa.Array:
    """Times as their integers, since Python's own types do not have the range of Arrow's."""
    kind = array.type
    if any(test(kind) for test in _INT64_TIMES):
        return array.cast(pa.int64())
    if pa.types.is_time32(kind) or pa.types.is_date32(kind):
        return array.cast(pa.int32())
    return array.cast(pa.float32()) if pa.types.is_float16(kind) else array


def _converter(kind: pa.DataType) -> Convert | None:
    """The function that converts a value of a plain array, not None, to a JSON value; None if it is one already."""
    if pa.types.is_floating(kind):
        return _float
    if pa.types.is_decimal(kind):
        return lambda value: format(value, "f")
    if is_binary(kind):
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
    return None


def _float(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _split(value: int, unit: str) -> tuple[int, str]:
    """A time as whole seconds, rounded down, and the fraction with the digits of the unit."""
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
