"""Keeps secrets out of what batchjob writes about itself: job.json, attempts, messages."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

HIDDEN = "***"
_SECRET_NAME = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_?KEY|CREDENTIALS?)$", re.IGNORECASE)
_MIN_LEN = 8  # a shorter value is no secret, and would be found in ordinary text
_HUB_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{20,}")
_USER_IN_URL = re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)")


def redact(text: str, environment: Mapping[str, str] | None = None) -> str:
    """The text without values of secret environment variables, hub tokens and passwords in URLs."""
    for value in _secrets(os.environ if environment is None else environment):
        text = text.replace(value, HIDDEN)
    if "hf_" in text:
        text = _HUB_TOKEN.sub(HIDDEN, text)
    if "://" in text:
        text = _USER_IN_URL.sub(HIDDEN, text)
    return text


def redact_values(value: Any) -> Any:
    """The same for every string in JSON values."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {key: redact_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact_values(item) for item in value]
    return value


def _secrets(environment: Mapping[str, str]) -> Iterator[str]:
    found = {value for name, value in environment.items() if _SECRET_NAME.search(name) and len(value) >= _MIN_LEN}
    return iter(sorted(found, key=len, reverse=True))  # the longer first: one may hold another
