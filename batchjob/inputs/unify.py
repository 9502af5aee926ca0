"""Types of one meaning become one type: a column that is `string` in one Parquet file and `large_string` in another.

`join` says which type holds both, `conform` brings an array to it. Types whose meaning differs (a number and a text, a
time with a zone and one without) have none.
"""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

_Test = Callable[[pa.DataType], bool]
t = pa.types
_TEXT: tuple[_Test, ...] = (t.is_string, t.is_large_string, t.is_string_view)
_BYTES: tuple[_Test, ...] = (t.is_binary, t.is_large_binary, t.is_binary_view, t.is_fixed_size_binary)
_FLOATS = (pa.float16(), pa.float32(), pa.float64())
_SIGNED = (pa.int8(), pa.int16(), pa.int32(), pa.int64())
_UNSIGNED = (pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64())
_UNITS = ("s", "ms", "us", "ns")


def join(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    """The type that holds what both hold, or None. Of two times the finer unit, which not every value need fit."""
    if a == b or t.is_null(b):
        return a
    if t.is_null(a):
        return b
    if t.is_dictionary(a) or t.is_dictionary(b):
        return join(_value_type(a), _value_type(b))
    for kinds, small, large in ((_TEXT, pa.string(), pa.large_string()), (_BYTES, pa.binary(), pa.large_binary())):
        if any(test(a) for test in kinds) and any(test(b) for test in kinds):
            return large if large in (a, b) else small
    if t.is_integer(a) and t.is_integer(b):
        return _integers(a, b)
    if a in _FLOATS and b in _FLOATS:
        return _FLOATS[max(_FLOATS.index(a), _FLOATS.index(b))]
    if t.is_decimal(a) and t.is_decimal(b):
        return _decimals(a, b)
    if t.is_date(a) and t.is_date(b):
        return pa.date32()
    return _times(a, b) or _nested(a, b)


def _value_type(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if t.is_dictionary(kind) else kind


def _integers(a: pa.DataType, b: pa.DataType) -> pa.DataType:
    if t.is_signed_integer(a) == t.is_signed_integer(b):
        return max(a, b, key=lambda kind: kind.bit_width)
    signed, unsigned = (a, b) if t.is_signed_integer(a) else (b, a)
    width = max(signed.bit_width, 2 * unsigned.bit_width)
    return next((kind for kind in _SIGNED if kind.bit_width == width), pa.int64())


def _decimals(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    scale = max(a.scale, b.scale)
    precision = scale + max(a.precision - a.scale, b.precision - b.scale)
    if precision > 76:
        return None
    wide = precision > 38 or t.is_decimal256(a) or t.is_decimal256(b)
    return pa.decimal256(precision, scale) if wide else pa.decimal128(precision, scale)


def _times(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    if t.is_timestamp(a) and t.is_timestamp(b) and a.tz == b.tz:
        return pa.timestamp(_finer(a, b), a.tz)
    if t.is_duration(a) and t.is_duration(b):
        return pa.duration(_finer(a, b))
    if t.is_time(a) and t.is_time(b):
        unit = _finer(a, b)
        return pa.time32(unit) if unit in ("s", "ms") else pa.time64(unit)
    return None


def _finer(a: pa.DataType, b: pa.DataType) -> str:
    return _UNITS[max(_UNITS.index(a.unit), _UNITS.index(b.unit))]


def _nested(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    if t.is_struct(a) and t.is_struct(b):
        return _structs(a, b)
    if _is_list(a) and _is_list(b):
        value = join(a.value_type, b.value_type)
        if value is None:
            return None
        return pa.large_list(value) if t.is_large_list(a) or t.is_large_list(b) else pa.list_(value)
    if t.is_map(a) and t.is_map(b):
        if any(t.is_nested(kind.item_type) or t.is_dictionary(kind.item_type) for kind in (a, b)):
            return None
        key, item = join(a.key_type, b.key_type), join(a.item_type, b.item_type)
        return None if key is None or item is None else pa.map_(key, item)
    return None


def _is_list(kind: pa.DataType) -> bool:
    """List views are none here: pyarrow 26 casts [[1]] of them to [[]]."""
    return bool(t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind))


def _structs(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    fields: dict[str, pa.DataType] = {}
    for kind in (a, b):
        if len({field.name for field in kind}) != kind.num_fields:
            return None
        for field in kind:
            joined = join(fields[field.name], field.type) if field.name in fields else field.type
            if joined is None:
                return None
            fields[field.name] = joined
    return pa.struct(list(fields.items()))


def conform(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """The array as another type that `join` gave, every value the same. Raises pa.ArrowInvalid for one that does not
    fit, as the year 9999 in nanoseconds."""
    if array.type == kind:
        return array
    if t.is_null(array.type):
        return pa.nulls(len(array), kind)
    if t.is_dictionary(array.type):
        return conform(array.dictionary_decode(), kind)
    if t.is_struct(kind):
        have = set(array.type.names)
        children = [
            conform(array.field(field.name), field.type) if field.name in have else pa.nulls(len(array), field.type)
            for field in kind
        ]
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=array.is_null())
    if t.is_list(kind) or t.is_large_list(kind):
        return _conform_list(array, kind)
    return array.cast(kind)


def _conform_list(array: pa.Array, kind: pa.DataType) -> pa.Array:
    if t.is_fixed_size_list(array.type):  # its nulls hold values, which a cast drops
        array = array.cast(pa.large_list(array.type.value_field))
    offsets = array.offsets
    start, stop = (offsets[0].as_py(), offsets[-1].as_py()) if len(offsets) else (0, 0)
    values = conform(array.values.slice(start, stop - start), kind.value_type)
    width = pa.int64() if t.is_large_list(kind) else pa.int32()
    offsets = pa.compute.subtract(offsets, pa.scalar(start, offsets.type)).cast(width)
    make = pa.LargeListArray if t.is_large_list(kind) else pa.ListArray
    return make.from_arrays(offsets, values, type=kind, mask=array.is_null() if array.null_count else None)


def is_certain(have: pa.DataType, kind: pa.DataType) -> bool:
    """True if every value of the type `have` fits `kind`, which `join` gave; else the values must be looked at."""
    if have == kind or t.is_null(have):
        return True
    if t.is_dictionary(have):
        return is_certain(have.value_type, kind)
    if t.is_struct(have):
        return all(is_certain(field.type, kind.field(field.name).type) for field in have)
    if t.is_map(have):
        return is_certain(have.key_type, kind.key_type) and is_certain(have.item_type, kind.item_type)
    if _is_list(have):
        return is_certain(have.value_type, kind.value_type)
    return not (t.is_timestamp(have) or t.is_duration(have) or (have == pa.uint64() and kind == pa.int64()))
