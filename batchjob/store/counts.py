"""Counts of output rows, as footers, summaries and `status` give them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class RowCounts:
    """Numbers of output rows (one per input row and sample) and of their tokens.

    `num_prompt_tokens` counts a prompt once per sample, as the output column does.
    """

    num_ok: int = 0
    num_error: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    errors: dict[str, int] = field(default_factory=dict)  # by error type

    @property
    def num_rows(self) -> int:
        return self.num_ok + self.num_error

    def add_row(self, error_type: str | None, num_prompt_tokens: int, num_output_tokens: int) -> None:
        if error_type is None:
            self.num_ok += 1
        else:
            self.num_error += 1
            self.errors[error_type] = self.errors.get(error_type, 0) + 1
        self.num_prompt_tokens += num_prompt_tokens
        self.num_output_tokens += num_output_tokens

    def add(self, other: RowCounts) -> None:
        self.num_ok += other.num_ok
        self.num_error += other.num_error
        self.num_prompt_tokens += other.num_prompt_tokens
        self.num_output_tokens += other.num_output_tokens
        for name, number in other.errors.items():
            self.errors[name] = self.errors.get(name, 0) + number

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": self.num_ok,
            "error": self.num_error,
            "prompt_tokens": self.num_prompt_tokens,
            "output_tokens": self.num_output_tokens,
            "errors": dict(sorted(self.errors.items())),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RowCounts:
        """Raises KeyError, TypeError or ValueError on anything else than what `to_json` gives."""
        return cls(
            num_ok=int(data["ok"]),
            num_error=int(data["error"]),
            num_prompt_tokens=int(data["prompt_tokens"]),
            num_output_tokens=int(data["output_tokens"]),
            errors={str(name): int(number) for name, number in data["errors"].items()},
        )
