"""Dotted paths into a row: `body.messages`, `turns.0`. A column or key whose own name has the dots comes first."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from batchjob.prompts.forms import InvalidPrompt, kind_of


def root_of(path: str, columns: Collection[str]) -> str | None:
    """The column that a path begins with: the longest name there is; None if there is none."""
    return next((name for name in _beginnings(path) if name in columns), None)


def look_up(fields: Mapping[str, Any], path: str) -> Any:
    """The value at a path, None where it is null or its column absent. Raises InvalidPrompt where the row has no such
    place. A number is an index into a list, any other part a key of an object or of a Parquet map."""
    if path in fields:
        return fields[path]
    if "." not in path:
        return None
    name = root_of(path, fields)
    if name is None:
        return None
    value, at = fields[name], name
    while at != path:
        if value is None:
            raise InvalidPrompt(f"there is no {path!r}: {at!r} is null or absent", of_column=at != name)
        value, at = _step(value, at, path)
    return value


def look_up_or_none(fields: Mapping[str, Any], path: str) -> Any:
    try:
        return look_up(fields, path)
    except InvalidPrompt:
        return None


def _step(value: Any, at: str, path: str) -> tuple[Any, str]:
    """One part further: the value, and how much of the path that is."""
    rest = path[len(at) + 1 :]
    first = rest.partition(".")[0]
    if isinstance(value, list):
        if first.isascii() and first.isdigit():
            if int(first) < len(value):
                return value[int(first)], f"{at}.{first}"
            raise InvalidPrompt(
                f"there is no {path!r}: {at!r} is a list of {len(value)}, counted from 0", of_column=True
            )
        if value and all(isinstance(item, dict) and item.keys() == {"key", "value"} for item in value):
            value = {str(item["key"]): item["value"] for item in value}
    if isinstance(value, Mapping):
        key = next((key for key in _beginnings(rest) if key in value), None)
        if key is not None:
            return value[key], f"{at}.{key}"
        keys = ", ".join(map(repr, list(value)[:20])) or "no keys"
        raise InvalidPrompt(f"there is no {path!r}: {at!r} has {keys}", of_column=True)
    raise InvalidPrompt(f"there is no {path!r}: {at!r} is {kind_of(value)}", of_column=True)


def _beginnings(path: str) -> list[str]:
    """`a.b.c`, `a.b`, `a`."""
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
