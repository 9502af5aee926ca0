"""Sampling settings of single rows, on top of the job's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from batchjob.errors import UsageError
from batchjob.prompts.forms import from_map
from batchjob.sampling import SamplingParams

_MAX_KNOWN = 4096


class RowParams:
    """Parses the values of a params column; equal values give one object, so that rows share it."""

    def __init__(self, column: str, base: SamplingParams, vocab_size: int, special_tokens: Mapping[str, int]) -> None:
        self._column, self._base, self._vocab_size, self._special_tokens = column, base, vocab_size, special_tokens
        self._default = base.with_special_stops(special_tokens)
        self._known: dict[tuple[bool, str], SamplingParams | str] = {}

    def parse(self, value: Any) -> SamplingParams | str | None:
        """The row's settings; None where the job's hold unchanged; a message where the value cannot be used."""
        if value is None:
            return None
        key = (isinstance(value, str), value if isinstance(value, str) else repr(value))
        found = self._known.get(key)
        if found is None:
            found = self._parse(value)
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[key] = found
        return None if found == self._default else found

    def _parse(self, value: Any) -> SamplingParams | str:
        where = f"column {self._column!r}"
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                return f"{where} is not JSON: {error}"
            if value is None:
                return self._default
        value = {} if value == [] else from_map(value)
        if not isinstance(value, Mapping):
            return f"{where} must hold an object of sampling settings"
        try:
            given = {name: from_map(item) for name, item in value.items()}
            params = self._base.override(given).with_special_stops(self._special_tokens)
        except (UsageError, TypeError, ValueError, OverflowError) as error:  # such as a seed of 1e999
            return f"{where}: {error}"
        for token in (*params.stop_token_ids, *(token for token, _ in params.logit_bias)):
            if token >= self._vocab_size:
                return f"{where}: token id {token} is not below the vocabulary size {self._vocab_size}"
        return params
