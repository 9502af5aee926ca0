"""Which columns make a row's prompt: names given by the user, or the defaults that the input has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from batchjob.errors import InputDataError, UsageError
from batchjob.spec import JobSpec

DEFAULTS = {"prompt": "text", "messages": "messages", "prompt_token_ids": "token_ids"}


@dataclass(frozen=True, slots=True)
class PromptSource:
    """Resolved column names. Plain data: `to_dict` and `from_dict` go through JSON.

    `kind`: "text", "template" (over `columns`), "messages", "token_ids", or "any": each row has exactly one of the
    default `columns` that is not null.
    """

    kind: str
    columns: tuple[str, ...]
    template: str = ""
    params: str | None = None
    id: str | None = None

    @property
    def read(self) -> list[str]:
        """The input columns to read, each once."""
        extra = [name for name in (self.params, self.id) if name is not None]
        return list(dict.fromkeys([*self.columns, *extra]))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PromptSource:
        return cls(**{**data, "columns": tuple(data["columns"])})


def resolve_prompt(spec: JobSpec, columns: Iterable[str]) -> PromptSource:
    """Finds the prompt among the input's columns. Raises InputDataError (a column that no row has, listing those there
    are) and UsageError (flags that exclude each other, a broken template).
    """
    known = list(columns)
    given = [name for name in DEFAULTS if getattr(spec, name) is not None]
    if len(given) > 1:
        flags = " and ".join("--" + name.replace("_", "-") for name in given)
        raise UsageError(f"{flags} exclude each other: give one of them")
    params = _optional(spec.params, "params", known)
    row_id = _optional(spec.id, "id", known)
    template = ""
    if given:
        kind, value = DEFAULTS[given[0]], getattr(spec, given[0])
        if kind == "text" and ("{" in value or "}" in value):
            kind, template = "template", value
            parts = parse_template(value)
            names = tuple(dict.fromkeys(part for is_column, part in parts if is_column))
            if not names:
                raise UsageError(f"--prompt {value!r} names no column: write one as {{column}}")
        else:
            names = (value,)
        for name in names:
            _require(name, "--" + given[0].replace("_", "-"), known, in_template=kind == "template")
    else:
        names = tuple(name for name in DEFAULTS if name in known)
        if not names:
            raise InputDataError(
                f"no prompt: the input has none of the columns {', '.join(DEFAULTS)}; name one with --prompt COLUMN, "
                f"--prompt 'a template with {{column}}' or --messages COLUMN. {_listed(known)}"
            )
        kind = DEFAULTS[names[0]] if len(names) == 1 else "any"
    if kind == "token_ids" and (spec.chat or spec.system is not None):
        raise UsageError("--chat and --system need text or messages; token ids are sent as they are")
    return PromptSource(kind, names, template, params, row_id)


def prompt_columns(spec: JobSpec, columns: Iterable[str]) -> list[str]:
    """The input columns that the prompts need, see `resolve_prompt`."""
    return resolve_prompt(spec, columns).read


def _optional(given: str | None, default: str, known: list[str]) -> str | None:
    if given is not None:
        _require(given, f"--{default}", known, in_template=False)
        return given
    return default if default in known else None


def _require(name: str, flag: str, known: list[str], *, in_template: bool) -> None:
    if name in known:
        return
    hint = "; write {{ and }} for braces that are text" if in_template else ""
    if flag == "--prompt" and not in_template:
        hint = "; a template needs its columns in braces, as in 'Summarise: {text}'"
    raise InputDataError(f"{flag}: no input row has a column {name!r}{hint}. {_listed(known)}")


def _listed(known: list[str]) -> str:
    shown = ", ".join(known[:50]) + (f" and {len(known) - 50} more" if len(known) > 50 else "")
    return f"Columns: {shown or 'none'}"


def parse_template(template: str) -> list[tuple[bool, str]]:
    """(is a column, text or name) parts of a --prompt template. `{{` and `}}` stand for braces. Raises UsageError."""
    parts: list[tuple[bool, str]] = []
    text = ""
    index = 0
    while index < len(template):
        char = template[index]
        if char in "{}" and template[index : index + 2] == char * 2:
            text += char
            index += 2
        elif char == "{":
            end = template.find("}", index)
            name = template[index + 1 : end]
            if end < 0 or "{" in name:
                raise UsageError(f"--prompt: the brace at position {index + 1} is never closed; write {{{{ for a brace")
            if not name:
                raise UsageError("--prompt: {} names no column; write {column}, or {{}} for braces")
            if text:
                parts.append((False, text))
            parts.append((True, name))
            text = ""
            index = end + 1
        elif char == "}":
            raise UsageError(f"--prompt: the brace at position {index + 1} closes nothing; write }}}} for a brace")
        else:
            text += char
            index += 1
    if text:
        parts.append((False, text))
    return parts
