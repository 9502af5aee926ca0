"""The generated columns of the output: `COLUMNS` has one entry for each, and everything about a column is in it.

The schema of the parts, the records of the write-ahead log, their checks and the content hash of a part are derived
from this table. A new column is an entry here, a field of `Completion`, a flag of `JobSpec`, and the code that fills
the field. Its entry goes to the end of the table, behind a flag: existing jobs continue without it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from json.encoder import encode_basestring
from operator import attrgetter
from typing import Any

import pyarrow as pa

from batchjob.errors import ConfigMismatchError
from batchjob.records import Completion
from batchjob.spec import JobSpec

_MAX_INT32 = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of value: its Arrow type, its JSON text in a log record, and the check of a value that a log holds.

    `encode` is None for integers.
    """

    type: pa.DataType
    encode: Callable[[Any], str] | None
    is_valid: Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Column:
    """One generated column. Its value is `attribute` of a `Completion`, and `key` of a log record.

    `pick` gives it where a record's value fills several columns. With a `flag`, only jobs with that flag have it.
    """

    name: str
    kind: Kind
    key: str
    attribute: str
    nullable: bool = False
    pick: Callable[[Any], Any] | None = None
    flag: str | None = None
    bytes_per_token: float = 0.0  # size in a part for each output token, compressed, as far as it grows with them


def _is_int(value: Any) -> bool:
    return type(value) is int


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_INT32


def _encode_text(text: str | None) -> str:
    return "null" if text is None else encode_basestring(text)


def _is_text(value: Any) -> bool:
    """A text that UTF-8 can hold (JSON may spell half of a surrogate pair, which a part cannot keep), or none."""
    try:
        return value is None or (isinstance(value, str) and value.encode() is not None)
    except UnicodeEncodeError:
        return False


def _encode_ids(ids: Sequence[int]) -> str:
    return f"[{','.join(map(str, ids))}]"


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_count, value))


def _encode_error(error: tuple[str, str] | None) -> str:
    """The one value that comes with its key: a record of a row without an error does not have it."""
    return "" if error is None else f',"error":[{encode_basestring(error[0])},{encode_basestring(error[1])}]'


def _is_error(value: Any) -> bool:
    is_pair = isinstance(value, list) and len(value) == 2
    return value is None or (is_pair and all(isinstance(text, str) and _is_text(text) for text in value))


_ROW = Kind(pa.int64(), None, _is_int)
_SAMPLE = Kind(pa.int32(), None, _is_int)
_COUNT = Kind(pa.int32(), None, _is_count)
_TEXT = Kind(pa.string(), _encode_text, _is_text)
_IDS = Kind(pa.list_(pa.int32()), _encode_ids, _are_ids)
_ERROR = Kind(pa.string(), _encode_error, _is_error)  # type and message

COLUMNS = (
    Column("row_index", _ROW, "row", "row_index"),  # ordinal over all input files
    Column("sample_index", _SAMPLE, "sample", "sample_index"),
    # The carried columns of the input stand here.
    Column("status", _ERROR, "error", "error", pick=lambda error: "ok" if error is None else "error"),
    Column("output", _TEXT, "text", "text", nullable=True, bytes_per_token=2.0),
    Column("finish_reason", _TEXT, "finish", "finish_reason", nullable=True),
    Column("num_prompt_tokens", _COUNT, "prompt_tokens", "num_prompt_tokens"),
    Column("num_output_tokens", _COUNT, "output_tokens", "num_output_tokens"),
    Column("error_type", _ERROR, "error", "error", nullable=True, pick=lambda error: error and error[0]),
    Column("error_message", _ERROR, "error", "error", nullable=True, pick=lambda error: error and error[1]),
    Column(
        "output_token_ids", _IDS, "token_ids", "token_ids", nullable=True, flag="output_token_ids", bytes_per_token=2.0
    ),
)
NUM_PLACE_COLUMNS = 2  # the first two; they stand before the carried columns, all others after them
FIRST_GENERATED = COLUMNS[NUM_PLACE_COLUMNS].name
OWN_COLUMNS = tuple(column.name for column in COLUMNS)
FLAGS = tuple(column.flag for column in COLUMNS if column.flag is not None)
_OLDEST_FLAGS = ("output_token_ids",)  # in the fingerprint of every job; a later flag only where it is on

# The order in a record, which the content hash keeps too. Other keys follow, and "error" is the last.
_OF = 2  # where "of" stands, the number of samples that the row has
_FIRST_KEYS = ("row", "sample", "prompt_tokens", "output_tokens", "finish", "text")


class OutputColumns:
    """The generated columns of one job: those without a flag, and those whose flags are given."""

    def __init__(self, flags: Collection[str] = ()) -> None:
        self.columns = tuple(column for column in COLUMNS if column.flag is None or column.flag in flags)
        self.flags = tuple(column.flag for column in self.columns if column.flag is not None)
        by_key = {column.key: column for column in self.columns}
        error = by_key.pop("error")
        fields = [by_key.pop(key) for key in _FIRST_KEYS]
        fields += by_key.values()
        self._fields = (*fields, error)
        self._attributes = attrgetter(*(column.attribute for column in fields))
        self._encoders = [(i, encode) for i, column in enumerate(self._fields) if (encode := column.kind.encode)]
        row, sample, *others = (f'"{column.key}":%{"s" if column.kind.encode else "d"}' for column in fields)
        self._line = "{" + ",".join((row, sample, '"of":%d', *others)) + "%s}"

    @classmethod
    def asked(cls, spec: JobSpec) -> OutputColumns:
        """The columns that a job with these settings has."""
        return cls([flag for flag in FLAGS if getattr(spec, flag)])

    @classmethod
    def of_schema(cls, schema: pa.Schema) -> OutputColumns:
        """The columns of the job whose parts have this schema. Raises ValueError if it is none of a part, and
        ConfigMismatchError for a column that only a newer version knows."""
        names = schema.names
        names = names[:NUM_PLACE_COLUMNS] + names[names.index(FIRST_GENERATED) :]
        if unknown := [name for name in names if name not in OWN_COLUMNS]:
            raise ConfigMismatchError(
                f"the job has a column {unknown[0]!r}, which this batchjob does not know. Use a newer batchjob."
            )
        columns = cls([column.flag for column in COLUMNS if column.flag is not None and column.name in names])
        if names != [column.name for column in columns.columns]:
            raise ValueError("its schema is not that of a part")
        return columns

    def schema(self, carried: Iterable[pa.Field]) -> list[pa.Field]:
        """The fields of a part: the row's place, the carried columns, what was generated."""
        own = [pa.field(column.name, column.kind.type, column.nullable) for column in self.columns]
        return [*own[:NUM_PLACE_COLUMNS], *carried, *own[NUM_PLACE_COLUMNS:]]

    def fingerprint(self) -> dict[str, bool]:
        """The flags as settings that a resume must share."""
        return {flag: flag in self.flags for flag in FLAGS if flag in self.flags or flag in _OLDEST_FLAGS}

    def encode(self, completion: Completion, num_samples: int) -> bytes:
        """The payload of the log record of a finished sample. `num_samples` is how many the row has in all."""
        error = completion.error
        values = [*self._attributes(completion), None if error is None else (error.type, error.message)]
        for i, encode in self._encoders:
            values[i] = encode(values[i])
        values.insert(_OF, num_samples)
        return _to_utf8(self._line % tuple(values))

    def encode_rows(self, values: Mapping[str, Sequence[Any]]) -> bytes:
        """Output rows, given as lists of column values, in the form of log records, a line for each. How many samples a
        row has is no part of it."""
        errors = [
            None if kind is None else (kind, message)
            for kind, message in zip(values["error_type"], values["error_message"], strict=True)
        ]
        lists: list[Iterable[Any]] = [*(values[field.name] for field in self._fields[:-1]), errors]
        for i, encode in self._encoders:
            lists[i] = map(encode, lists[i])
        lists.insert(_OF, repeat(0, len(errors)))
        line = self._line + "\n"
        return _to_utf8("".join([line % row for row in zip(*lists, strict=True)]))

    def is_valid(self, record: Mapping[str, Any]) -> bool:
        """Whether a log record holds a valid value for every column."""
        *fields, error = self._fields
        return error.kind.is_valid(record.get(error.key)) and all(
            field.key in record and field.kind.is_valid(record[field.key]) for field in fields
        )

    def values(self, records: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
        """The column values of valid log records, by column."""
        by_key = {field.key: [record.get(field.key) for record in records] for field in self._fields}
        return {
            column.name: by_key[column.key] if column.pick is None else [*map(column.pick, by_key[column.key])]
            for column in self.columns
        }


def _to_utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which UTF-8 cannot hold
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode()
