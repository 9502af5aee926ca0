"""Types of columns by the values of rows, where a file does not name them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa

from batchjob.inputs.folders import FOLDER_MARK, partition_kinds

MAX_COLUMNS = 4096
_ARROW = {"int64": pa.int64(), "double": pa.float64(), "bool": pa.bool_(), "string": pa.string(), "json": pa.string()}
_INT, _BIG_INT, _FLOAT, _BOOL, _STRING, _OTHER = 1, 2, 4, 8, 16, 32
_KINDS = {_INT: "int64", _FLOAT: "double", _BOOL: "bool", _STRING: "string", 0: "string"}
_BITS: dict[type, int] = {str: _STRING, bool: _BOOL, float: _FLOAT, int: _INT, type(None): 0}


class ColumnTypes:
    """Collects the types of every top-level column over all rows, then names how each is stored.

    One scalar type over the whole input (nulls aside) gives "int64", "double", "bool" or "string". Anything else is
    "json": mixed types, lists, objects, integers and floats together, integers beyond int64, floats beyond double.
    """

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}

    def add(self, row: dict[str, Any]) -> None:
        seen = self._seen
        for key, value in row.items():
            bits = _BITS.get(value.__class__, _OTHER)
            if bits & (_INT | _FLOAT):
                if bits == _INT:
                    if not -(1 << 63) <= value < 1 << 63:
                        bits = _BIG_INT
                elif value - value != 0.0:  # 1e999 reads as infinity
                    bits = _OTHER
            try:
                if seen[key] | bits != seen[key]:
                    seen[key] |= bits
            except KeyError:
                seen[key] = bits

    def __len__(self) -> int:
        return len(self._seen)

    def kinds(self) -> dict[str, str]:
        """Column name to kind, in order of first appearance. A column of nulls alone is a "string"."""
        return {key: _KINDS.get(bits, "json") for key, bits in self._seen.items()}

    def only_null(self) -> frozenset[str]:
        """The columns in which no row has a value."""
        return frozenset(key for key, bits in self._seen.items() if not bits)

    def add_folders(self, paths: Iterable[str]) -> None:
        """Adds the columns that the folders of files give. One that rows have too keeps its type if that can hold what
        the folders say."""
        kinds, empty = self.kinds(), self.only_null()
        for name, kind in partition_kinds(paths).items():
            known = None if name in empty else kinds.get(name)
            if known is None or known not in (kind, "string"):
                self.add({name: 0 if kind == "int64" else ""})

    def schema(self, kept: Sequence[str], paths: Iterable[str]) -> pa.Schema:
        """The Arrow types of these columns; those that the folders of `paths` give are marked."""
        kinds, folders = self.kinds(), partition_kinds(paths)
        return pa.schema(
            [pa.field(name, _ARROW[kinds[name]], metadata=FOLDER_MARK if name in folders else None) for name in kept]
        )
