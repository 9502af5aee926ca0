"""The report of `batchjob validate`, for a terminal and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from batchjob.errors import InputDataError
from batchjob.report.progress import counted, printable


@dataclass(slots=True)
class Report:
    """The findings of `validate`. `errors` maps an error type to its count and the first few messages."""

    files: list[str]
    columns: dict[str, str]
    prompt: str
    num_rows: int = 0
    num_chunks: int = 0
    num_bad_rows: int = 0
    errors: dict[str, dict[str, Any]] = field(default_factory=dict)
    num_prompt_tokens: int = 0
    token_lengths: dict[str, float] = field(default_factory=dict)  # min, median, mean, p90, p99, max
    token_histogram: dict[str, int] = field(default_factory=dict)  # "64-127": prompts
    shared_prefix_share: float = 0.0  # of the prompt tokens: full blocks that an earlier prompt begins with too
    shared_prefix_exact: bool = True
    num_rows_with_special_tokens: int = 0
    special_token_examples: list[str] = field(default_factory=list)
    id_column: str | None = None
    num_duplicate_ids: int = 0  # rows whose id an earlier row has
    duplicate_id_examples: list[dict[str, str]] = field(default_factory=list)  # id, first, again
    num_missing_ids: int = 0
    first_prompt_text: str | None = None
    first_prompt_tokens: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    max_error_rate: float = 0.01

    @property
    def exit_code(self) -> int:
        """65 where a run would end with it: too many bad rows, or all of them, or a damaged file."""
        bad = self.num_bad_rows
        too_many = bad > self.max_error_rate * self.num_rows or (bad > 0 and bad == self.num_rows)
        return InputDataError.exit_code if too_many or "input_damaged" in self.errors else 0

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "exit_code": self.exit_code}

    def render(self) -> str:
        """Lines for a terminal; control characters in the input's text are escaped."""
        lines = [
            f"{self.num_rows:,} rows in {counted(len(self.files), 'file')}, {counted(self.num_chunks, 'chunk')}; "
            f"prompt from {self.prompt}",
            "columns: " + ", ".join(f"{name} ({kind})" for name, kind in self.columns.items()),
            f"bad rows: {self.num_bad_rows:,}",
        ]
        for kind, found in self.errors.items():
            lines.append(f"  {kind}: {found['count']:,}")
            lines += [f"    {example}" for example in found["examples"]]
        if self.token_lengths:
            shown = ", ".join(f"{name} {value:,.4g}" for name, value in self.token_lengths.items())
            lines.append(f"prompt tokens: {self.num_prompt_tokens:,} in all; {shown}")
            most = max(self.token_histogram.values())
            for bucket, count in self.token_histogram.items():
                lines.append(f"  {bucket:>15} {count:>12,} {'#' * -(-40 * count // most)}")
            exact = "" if self.shared_prefix_exact else " (at least)"
            lines.append(f"shared prefixes: {self.shared_prefix_share:.1%} of the prompt tokens{exact}")
        lines.append(f"rows whose text holds special tokens: {self.num_rows_with_special_tokens:,}")
        lines += [f"  {example}" for example in self.special_token_examples]
        if self.id_column is not None:
            missing = f", {self.num_missing_ids:,} without one" if self.num_missing_ids else ""
            lines.append(f"duplicate ids in {self.id_column!r}: {self.num_duplicate_ids:,}{missing}")
            lines += [f"  {d['id']}: {d['first']} and {d['again']}" for d in self.duplicate_id_examples]
        if self.first_prompt_tokens:
            lines.append("first prompt, as text and as tokens:")
            if self.first_prompt_text is not None:
                lines += [f"  | {line}" for line in self.first_prompt_text.split("\n")]
            lines.append("  " + " ".join(map(repr, self.first_prompt_tokens)))
        lines += [f"warning: {warning}" for warning in self.warnings]
        return "\n".join(printable(line, limit=8000) for line in lines)
