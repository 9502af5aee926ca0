"""The columns that make a row's prompt: names given by the user, or the defaults that the input has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from batchjob.errors import InputDataError, UsageError
from batchjob.prompts.paths import root_of
from batchjob.spec import JobSpec

# What a row may give to its chat template beside the messages.
CHAT_COLUMNS = ("tools", "documents", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
DEFAULTS = {"prompt": "text", "messages": "messages", "prompt_token_ids": "token_ids"}


@dataclass(frozen=True, slots=True)
class PromptSource:
    """Resolved names of columns, or dotted paths into them. Plain data: `to_dict` and `from_dict` go through JSON.

    `kind`: "text", "template" (over `columns`), "messages", "token_ids", or "any": each row has exactly one of the
    default `columns` that is not null. `roots` are the input's columns where dotted paths begin, `chat_columns` those
    (or the paths) that go to the chat template under the last part of their name.
    """

    kind: str
    columns: tuple[str, ...]
    template: str = ""
    params: str | None = None
    id: str | None = None
    roots: Mapping[str, str] = field(default_factory=dict)
    chat_columns: tuple[str, ...] = ()

    @property
    def read(self) -> list[str]:
        """The input columns to read, each once."""
        extra = [name for name in (self.params, self.id) if name is not None]
        paths = [*self.columns, *self.chat_columns, *extra]
        return list(dict.fromkeys([self.roots.get(path, path) for path in paths]))

    def to_dict(self) -> dict[str, Any]:
        """Without `roots` and `chat_columns` where there are none: jobs of before had no such keys."""
        data = asdict(self)
        return {name: value for name, value in data.items() if value or name not in ("roots", "chat_columns")}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PromptSource:
        return cls(**{**data, **{name: tuple(data.get(name, ())) for name in ("columns", "chat_columns")}})


def resolve_prompt(spec: JobSpec, columns: Iterable[str]) -> PromptSource:
    """Finds the prompt among the input's columns. Raises InputDataError (a column that no row has, listing those there
    are) and UsageError (flags that exclude each other, a broken template).
    """
    known = list(columns)
    given = [name for name in DEFAULTS if getattr(spec, name) is not None]
    if len(given) > 1:
        flags = " and ".join("--" + name.replace("_", "-") for name in given)
        raise UsageError(f"{flags} exclude each other: give one of them")
    params = None if spec.params == "none" else _optional(spec.params, "params", known)
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
    chat = _chat_columns(spec, kind, names[0], known)
    extra = [name for name in (params, row_id) if name is not None]
    found = {path: root_of(path, known) for path in (*names, *chat, *extra)}
    roots = {path: root for path, root in found.items() if root is not None and root != path}
    return PromptSource(kind, names, template, params, row_id, roots, chat)


def _chat_columns(spec: JobSpec, kind: str, name: str, known: list[str]) -> tuple[str, ...]:
    """The columns that go to the chat template with the messages; messages inside an object have them beside it."""
    is_inside = kind == "messages" and name not in known
    paths = {column: f"{name.rpartition('.')[0]}.{column}" if is_inside else column for column in CHAT_COLUMNS}
    if spec.chat_columns not in ("all", "none"):
        wanted = [column.strip() for column in spec.chat_columns.split(",") if column.strip()]
        for column in wanted:
            if column not in CHAT_COLUMNS:
                raise UsageError(f"--chat-columns: {column!r} is none of {', '.join(CHAT_COLUMNS)}")
            _require(paths[column], "--chat-columns", known, in_template=False)
        paths = {column: paths[column] for column in wanted}
    is_chat = spec.chat or spec.system is not None or kind in ("messages", "any")
    if spec.chat_columns == "none" or not is_chat:
        return ()
    return tuple(path for path in paths.values() if path != name and root_of(path, known) is not None)


def prompt_columns(spec: JobSpec, columns: Iterable[str]) -> list[str]:
    """The input columns that the prompts need, see `resolve_prompt`."""
    return resolve_prompt(spec, columns).read


def _optional(given: str | None, default: str, known: list[str]) -> str | None:
    if given is not None:
        _require(given, f"--{default}", known, in_template=False)
        return given
    return default if default in known else None


def _require(name: str, flag: str, known: list[str], *, in_template: bool) -> None:
    if root_of(name, known) is not None:
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
