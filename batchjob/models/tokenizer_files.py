"""What the tokenizer's files say: digests for a job's fingerprint, the end token, the special tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchjob.errors import UnsupportedModelError

_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
# Every file name that a tokenizer of Transformers is made of.
_FILES = (
    "added_tokens.json",
    "merges.txt",
    "special_tokens_map.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
)
# Entries of tokenizer_config.json that say where it came from, not how text becomes tokens.
_NO_EFFECT = {"chat_template", "is_local", "local_files_only", "name_or_path", "transformers_version"}


def digest(directory: Path, tokenizer_config: Mapping[str, Any]) -> str:
    """SHA-256 over the files that turn text into tokens; the chat template is not part of it."""
    state = hashlib.sha256()
    settings = {key: value for key, value in tokenizer_config.items() if key not in _NO_EFFECT}
    state.update(json.dumps(settings, sort_keys=True).encode())
    for name in _FILES:
        if (directory / name).is_file():
            content = (directory / name).read_bytes()
            state.update(f"\n{name} {len(content)}\n".encode())
            state.update(content)
    return state.hexdigest()


def template_digest(directory: Path, tokenizer_config: Mapping[str, Any]) -> str:
    """SHA-256 of the chat template, wherever it is kept; "" without one."""
    for name in _TEMPLATE_FILES:
        if (directory / name).is_file():
            return hashlib.sha256((directory / name).read_bytes()).hexdigest()
    template = tokenizer_config.get("chat_template")
    if not template:
        return ""
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def eos_token_id(directory: Path, tokenizer_config: Mapping[str, Any]) -> int | None:
    """The id of the tokenizer's own end token, if its files name one."""
    token = _text(tokenizer_config.get("eos_token"))
    if token is None:
        return None
    decoder = tokenizer_config.get("added_tokens_decoder")
    if isinstance(decoder, dict):
        for key, entry in decoder.items():
            if _text(entry) == token and key.isdecimal():
                return int(key)
    for name, find in (("tokenizer.json", _find_in_tokenizer), ("vocab.json", dict.get)):
        if (directory / name).is_file():
            value = find(_load(directory / name), token)
            if type(value) is int:
                return value
    return None


def special_tokens(directory: Path) -> dict[str, int]:
    """Text -> id of the tokens that are left out of every decoded text, by tokenizer.json."""
    path = directory / "tokenizer.json"
    entries = _load(path).get("added_tokens") if path.is_file() else None
    return {
        entry["content"]: entry["id"]
        for entry in entries or ()
        if isinstance(entry, dict) and entry.get("special") and _text(entry) and type(entry.get("id")) is int
    }


def _find_in_tokenizer(content: dict[str, Any], token: str) -> Any:
    for entry in content.get("added_tokens") or ():
        if isinstance(entry, dict) and entry.get("content") == token:
            return entry.get("id")
    model = content.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    return vocab.get(token) if isinstance(vocab, dict) else None


def _text(value: Any) -> str | None:
    """A token is written as text or as an object with its text as `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _load(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UnsupportedModelError(f"{path} cannot be read: {error}") from None
    return content if isinstance(content, dict) else {}
