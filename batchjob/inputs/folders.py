"""The columns that folders give to the rows of their files.

A folder named `lang=de` gives all rows below it the column `lang` with the value `de`, as Hive and Spark write it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from urllib.parse import unquote

import pyarrow as pa

# Marks a column that folders give to files that lack it. Jobs planned before there were any have null there.
FOLDER_MARK = {b"batchjob.folder": b"true"}
_NULL = "__HIVE_DEFAULT_PARTITION__"
_WHOLE_NUMBER = re.compile(r"0|-?[1-9][0-9]{0,18}")


def partition_values(path: str) -> dict[str, str | None]:
    """The columns that the folders directly above a file give to its rows, outermost first.

    Only folders in a row count, from the file's own upwards, so that it does not matter how the file was named in
    `--input`. Values are text; `__HIVE_DEFAULT_PARTITION__` stands for null.
    """
    return dict(_folder_values(os.path.dirname(path)))


@lru_cache(maxsize=1024)
def _folder_values(folder: str) -> tuple[tuple[str, str | None], ...]:
    found: dict[str, str | None] = {}
    for name in reversed(folder.split("/")):
        key, equals, value = name.partition("=")
        if not equals or not key:
            break
        # An inner folder counts more than an outer one of the same key.
        found.setdefault(_text(key), None if value == _NULL else _text(value))
    return tuple(reversed(found.items()))


def _text(part: str) -> str:
    return os.fsencode(unquote(part)).decode("utf-8", "replace")


def partition_kinds(paths: Iterable[str]) -> Mapping[str, str]:
    """Column name to "int64" or "string" for all partition columns of these files, in order of first appearance.

    A column is of whole numbers if all its values are written the way that numbers are: 01 stays text.
    """
    kinds: dict[str, str] = {}
    for values in dict.fromkeys(_folder_values(os.path.dirname(path)) for path in paths):
        for key, value in values:
            if value is None:
                kinds.setdefault(key, "")
            elif _WHOLE_NUMBER.fullmatch(value) is None or not -(1 << 63) <= int(value) < 1 << 63:
                kinds[key] = "string"
            elif kinds.get(key) != "string":
                kinds[key] = "int64"
    return {key: kind or "string" for key, kind in kinds.items()}


def is_of_folders(field: pa.Field) -> bool:
    """True for a carried column whose values folders give where the rows have none."""
    return bool(field.metadata) and FOLDER_MARK.items() <= field.metadata.items()
