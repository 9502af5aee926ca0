"""Checks on one row's raw prompt: text for a template, chat messages, token ids. Each failure is an `InvalidPrompt`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

# Names that Transformers' own function has, or that are ours to say.
_RESERVED = frozenset(
    "self conversation conversations messages tools documents chat_template add_generation_prompt "
    "continue_final_message tokenize sanitize_control_tokens padding truncation max_length return_tensors return_dict "
    "return_assistant_tokens_mask tokenizer_kwargs strftime_now".split()
)
_NEEDS_CONTENT = ("user", "system", "developer")


class InvalidPrompt(Exception):
    """The row's prompt cannot be used; the message says why, in words for the row's author.

    `of_column`: the reason lies in what the column holds or in the job's flags, so that other rows may well share it.
    """

    def __init__(self, message: str, *, of_column: bool = False) -> None:
        super().__init__(message)
        self.of_column = of_column


def template_text(name: str, value: Any) -> str:
    """A column's value as it stands in a --prompt template: text as it is, anything else as JSON would write it."""
    if isinstance(value, str):
        return value
    if value is None:
        raise InvalidPrompt(f"column {name!r} is null or absent")
    if isinstance(value, bytes):
        raise InvalidPrompt(f"column {name!r} holds binary data, not text", of_column=True)
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:  # such as 1e999
        finite = _without_infinities(value)
        return finite if isinstance(finite, str) else json.dumps(finite, ensure_ascii=False)


def _without_infinities(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_infinities(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_infinities(item) for item in value]
    return value if not isinstance(value, float) or math.isfinite(value) else f"{'-' * (value < 0)}Infinity"


def plain_text(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if value is None:
        raise InvalidPrompt(f"column {name!r} is null or absent")
    raise InvalidPrompt(f"column {name!r} holds {kind_of(value)}, not text; {_as_text(name, value)}", of_column=True)


def _as_text(name: str, value: Any) -> str:
    """A remedy for a value that is no text."""
    if isinstance(value, bytes):
        return "decode it first"
    remedy = f"--prompt '{{{name}}}' sends it as JSON writes it"
    inner = next(iter(value), None) if isinstance(value, dict) else 0 if isinstance(value, list) and value else None
    return remedy if inner is None else f"name what is in it, as in --prompt '{name}.{inner}', or {remedy}"


def token_ids(name: str, value: Any, vocab_size: int) -> list[int]:
    """A non-empty list of ids below `vocab_size`."""
    if value is None:
        raise InvalidPrompt(f"column {name!r} is null or absent")
    if not isinstance(value, list):
        raise InvalidPrompt(f"column {name!r} holds {kind_of(value)}, not a list of token ids", of_column=True)
    if not value:
        raise InvalidPrompt(f"column {name!r} is an empty list: a prompt needs at least one token")
    if set(map(type, value)) != {int}:
        raise InvalidPrompt(f"column {name!r} must hold whole numbers only")
    if min(value) < 0 or max(value) >= vocab_size:
        bad = next(i for i in value if not 0 <= i < vocab_size)
        raise InvalidPrompt(f"column {name!r}: token id {bad} is not below the vocabulary size {vocab_size}")
    return value


def messages(name: str, value: Any, system: str | None) -> list[dict[str, Any]]:
    """The conversation as a chat template takes it: a role and a text in every turn, keys that are null left out.

    Null or missing content is "" for turns that may have none (an assistant that only calls a tool, a tool's result)
    and an error for user and system turns. Text parts are joined. `system` goes first unless the row has its own.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            message = f"column {name!r} holds text that is not JSON messages: {error}"
            raise InvalidPrompt(message, of_column=True) from None
    if value is None:
        raise InvalidPrompt(f"column {name!r} is null or absent")
    if not isinstance(value, list):
        raise InvalidPrompt(f"column {name!r} holds {kind_of(value)}, not a list of messages", of_column=True)
    if not value:
        raise InvalidPrompt(f"column {name!r} is an empty list: a chat needs at least one message")
    turns = [_turn(name, index, turn) for index, turn in enumerate(value)]
    if system is not None and not any(turn["role"] == "system" for turn in turns):
        turns.insert(0, {"role": "system", "content": system})
    return turns


def chat_variables(paths: Mapping[str, Any]) -> dict[str, Any]:
    """The variables that a row gives to its chat template beside the messages, from the values of its chat columns.

    Each may be JSON text; of one that is not, the fields that are null are left out, since Parquet has every field in
    every row.
    """
    out: dict[str, Any] = {}
    for path, given in paths.items():
        name = path.rpartition(".")[2]
        value = _parsed(path, given) if isinstance(given, str) else without_nulls(given)
        if value is None:
            continue
        if name in ("add_generation_prompt", "continue_final_message"):
            if not isinstance(value, bool):
                raise _misused(path, value, "true or false")
            out[name] = value
        elif name in ("tools", "documents"):
            if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
                raise _misused(path, value, "a list of objects")
            if value:
                out[name] = value
        else:
            value = from_map(value) if value else {}
            if not isinstance(value, dict):
                raise _misused(path, value, "an object")
            if bad := sorted(_RESERVED & value.keys()):
                raise InvalidPrompt(f"column {path!r} may not set {', '.join(bad)}", of_column=True)
            out.update(value)
    if out.get("continue_final_message"):
        if out.get("add_generation_prompt"):
            raise InvalidPrompt("continue_final_message and add_generation_prompt exclude each other", of_column=True)
        out["add_generation_prompt"] = False
    return out


def _misused(path: str, value: Any, wanted: str) -> InvalidPrompt:
    message = f"column {path!r} goes to the chat template and holds {kind_of(value)}, not {wanted}"
    return InvalidPrompt(f"{message}; --chat-columns none leaves such columns alone", of_column=True)


def _parsed(path: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise _misused(path, text, "JSON") from None


def without_nulls(value: Any) -> Any:
    """The value without the fields of objects that are null, at any depth."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def from_map(value: Any) -> Any:
    """A Parquet map comes as a list of keys and values; here it is an object. Anything else stays."""
    if isinstance(value, list) and all(isinstance(pair, dict) and pair.keys() == {"key", "value"} for pair in value):
        return {pair["key"]: pair["value"] for pair in value} or value
    return value


def _turn(name: str, index: int, turn: Any) -> dict[str, Any]:
    where = f"column {name!r}, message {index + 1}"
    if not isinstance(turn, Mapping):
        raise InvalidPrompt(f"{where} is {kind_of(turn)}, not an object with role and content")
    role = turn.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidPrompt(f"{where} has no role")
    content = turn.get("content")
    if content is None:
        if role in _NEEDS_CONTENT:
            raise InvalidPrompt(f"{where}: a {role} turn needs content")
        text = ""
    elif isinstance(content, str):
        text = content
    elif isinstance(content, Sequence) and not isinstance(content, bytes):
        text = "".join([_part(where, part) for part in content])
    else:
        raise InvalidPrompt(f"{where}: the content is {kind_of(content)}, not text")
    return {**{key: item for key, item in turn.items() if item is not None}, "role": role, "content": text}


def _part(where: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise InvalidPrompt(f"{where}: a content part is {kind_of(part)}, not an object")
    kind = part.get("type")
    if kind != "text":
        raise InvalidPrompt(f"{where}: a content part of type {kind!r}; only text parts can be sent to a text model")
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidPrompt(f"{where}: a text part without text")
    return text


def kind_of(value: Any) -> str:
    names = {dict: "an object", list: "a list", bool: "true or false", int: "a number", float: "a number", str: "text"}
    names[bytes] = "binary data"
    return names.get(type(value), f"a {type(value).__name__}")
