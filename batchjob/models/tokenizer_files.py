"""The tokenizer's files: digests for a job's fingerprint, the end token, the special tokens."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchjob.errors import UnsupportedModelError
from batchjob.models.pointers import refuse_pointer

_TEMPLATE, _TEMPLATES = "chat_template.jinja", "additional_chat_templates"
# The file names that a tokenizer of Transformers is made of.
_FILES = re.compile(
    r"added_tokens\.json|special_tokens_map\.json|tekken\.json|(merges|vocab)[\w-]*\.(txt|json|bpe)"
    r"|tokenizer[\w.-]*\.json|(.*\.)?tokenizer|.*\.(model(\.v\d+)?|spm|tiktoken|codes)"
)
# Entries of tokenizer_config.json that say where it came from, not how text becomes tokens.
_NO_EFFECT = {"chat_template", "is_local", "local_files_only", "name_or_path", "transformers_version"}


def digest(directory: Path, tokenizer_config: Mapping[str, Any]) -> str:
    """SHA-256 over the files that turn text into tokens; the chat template is not part of it."""
    state = hashlib.sha256()
    settings = {key: value for key, value in tokenizer_config.items() if key not in _NO_EFFECT}
    state.update(json.dumps(settings, sort_keys=True).encode())
    for path in sorted(directory.iterdir()):
        if _FILES.fullmatch(path.name) and path.name != "tokenizer_config.json" and path.is_file():
            refuse_pointer(path)
            content = path.read_bytes()
            state.update(f"\n{path.name} {len(content)}\n".encode())
            state.update(content)
    return state.hexdigest()


def text_digest(directory: Path) -> str:
    """The digest of all files that turn a row into tokens, as they are now. Raises UnsupportedModelError."""
    path = directory / "tokenizer_config.json"
    tokenizer_config = _load(path) if path.is_file() else {}
    return joined(digest(directory, tokenizer_config), template_digest(directory, tokenizer_config))


def joined(tokenizer_digest: str, template_digest: str) -> str:
    return f"{tokenizer_digest} {template_digest}"


def template_digest(directory: Path, tokenizer_config: Mapping[str, Any]) -> str:
    """SHA-256 of the chat templates that the tokenizer loads; "" without one.

    Those in files come before what tokenizer_config.json says; chat_template.json is for processors of pictures alone.
    """
    more = sorted((directory / _TEMPLATES).glob("*.jinja"))
    files = [path for path in (directory / _TEMPLATE, *more) if path.is_file()]
    if files:
        state = hashlib.sha256()
        for path in files:
            refuse_pointer(path)
            content = path.read_bytes()
            state.update(content if path.name == _TEMPLATE else f"\n{path.name} {len(content)}\n".encode() + content)
        return state.hexdigest()
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
    refuse_pointer(path)
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UnsupportedModelError(f"{path} cannot be read: {error}") from None
    return content if isinstance(content, dict) else {}
