"""JSON Lines: one line to one row, and values as they were written.

Rules: a row is one JSON object in UTF-8. NaN and Infinity are not JSON. Of a key given twice the last value counts.
Half of a surrogate pair, as an escape in any key or string, makes the row a row error (`invalid_encoding`); its
carried values have U+FFFD in that place. Lists and objects nest at most 256 deep. An absent key and null are the same:
null in the output.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from json import decoder as _json_decoder
from typing import Any

from batchjob.errors import InputDataError
from batchjob.inputs.digests import RawRow
from batchjob.inputs.formats.row_format import Parsed, RowFormat
from batchjob.inputs.streams import iter_lines
from batchjob.records import RowError

MAX_DEPTH = 256  # of lists and objects: far from where Python's own reader gives up, which depends on its caller

_HALF_PAIR = re.compile("[\ud800-\udfff]")
_HALF_PAIR_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_SPACE = re.compile(r"[ \t\n\r]*")


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON; write null")


_decoder = json.JSONDecoder(parse_constant=_refuse_constant)
_decode = _decoder.decode
# The two halves of Python's own decoder, both in C: (text, index) -> (value, index behind it).
_scan_value: Callable[[str, int], tuple[Any, int]] = _decoder.scan_once  # type: ignore[attr-defined]
_scan_string: Callable[[str, int, bool], tuple[str, int]] = _json_decoder.scanstring  # type: ignore[attr-defined]


def parse_row(raw: bytes) -> Parsed:
    """The object on one line. A row with half of a surrogate pair gives both: the object, mended, and the error."""
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        return None, RowError("invalid_encoding", f"byte {error.start + 1} of the line is not UTF-8")
    try:
        row = _decode(text)
    except json.JSONDecodeError as error:
        return None, RowError("invalid_json", f"not JSON: {error.msg} at character {error.pos + 1} of the line")
    except ValueError as error:  # a constant, or an integer of more digits than Python reads
        return None, RowError("invalid_json", f"not readable as JSON: {error}")
    except RecursionError:
        return None, _TOO_DEEP
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH and _is_too_deep(row):
        return None, _TOO_DEEP
    if row.__class__ is not dict:
        kind = "a list" if isinstance(row, list) else f"a bare {type(row).__name__}"
        return None, RowError("invalid_json", f"the line is {kind}, not a JSON object")
    if b"\\u" in raw and _HALF_PAIR_ESCAPE.search(raw) is not None:
        mended = _mend(row)
        if mended != row:
            where = next((key for key, value in row.items() if _mend({key: value}) != {key: value}), "")
            name = _HALF_PAIR.sub("\ufffd", where)
            return mended, RowError("invalid_encoding", f"column {name!r} holds half of a surrogate pair")
    return row, None


_TOO_DEEP = RowError("invalid_json", f"the JSON is nested more than {MAX_DEPTH} deep")


def _is_too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        nested = [item for item in level if isinstance(item, dict | list)]
        if not nested:
            return False
        level = [inner for item in nested for inner in (item.values() if isinstance(item, dict) else item)]
    return True


def _mend(value: Any) -> Any:
    if isinstance(value, str):
        return _HALF_PAIR.sub("\ufffd", value)
    if isinstance(value, dict):
        return {_mend(key): _mend(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_mend(item) for item in value]
    return value


def raw_values(text: str, wanted: Iterable[str]) -> dict[str, str]:
    """The JSON text of some top-level values exactly as written: 7.0, 1e2 and long integers keep their form.

    `text` must be a line that `parse_row` accepted. Null and absent values are left out.
    """
    names = set(wanted)
    out: dict[str, str] = {}
    space = _SPACE.match
    index = space(text).end() + 1  # type: ignore[union-attr]  # the pattern always matches
    while True:
        index = space(text, index).end()  # type: ignore[union-attr]
        if text[index] == "}":
            return out
        if text[index] == ",":
            index = space(text, index + 1).end()  # type: ignore[union-attr]
        key, index = _scan_string(text, index + 1, True)
        index = space(text, space(text, index).end() + 1).end()  # type: ignore[union-attr]
        value, end = _scan_value(text, index)
        if key in names:
            out.pop(key, None)  # of a key given twice the last counts
            if value is not None:
                out[key] = text[index:end]
        index = end


class Jsonl(RowFormat):
    """JSON Lines, plain or compressed. A file that nothing else claims is taken for it."""

    name = "jsonl"
    title = "JSONL"
    endings = (".jsonl", ".ndjson")
    row_noun = "a JSON object"
    advice = "batchjob reads JSON Lines: one object per line. Convert the file, or leave it out"

    def raw_rows(
        self, path: str, compression: str, *, offset: int = 0, line: int = 1, max_row_bytes: int
    ) -> Generator[RawRow, None, None]:
        return iter_lines(path, compression, offset=offset, line=line, max_line_bytes=max_row_bytes)

    def parse(self, raw: bytes) -> Parsed:
        return parse_row(raw)

    def json_texts(self, raw: bytes, columns: Collection[str]) -> Mapping[str, str]:
        return raw_values(raw.decode(), columns)

    def check_first_row(self, path: str, raw: bytes) -> None:
        """A file that holds one document over many lines is known by its first line, and refused with what to do."""
        text = raw.strip()
        if text in (b"{", b"["):
            kind = "an indented JSON object" if text == b"{" else "a JSON array"
            how = "jq -c ." if text == b"{" else "jq -c '.[]'"
            raise InputDataError(f"{path} is {kind}, not JSON Lines; convert it with: {how} FILE > FILE.jsonl")
        if text.startswith(b"[{") and text.endswith(b"}]"):
            raise InputDataError(
                f"{path} is a JSON array, not JSON Lines; convert it with: jq -c '.[]' FILE > FILE.jsonl"
            )
