"""`RunResult`: counts, exit code, and the closing lines that say where the rows are and how to read them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from batchjob.errors import EngineError, InputDataError, StoppedEarlyError
from batchjob.report.progress import counted, duration
from batchjob.slurm import Requeue

if TYPE_CHECKING:
    from batchjob.store.status import Status


@dataclass(slots=True)
class RunResult:
    """Result of `batchjob.run`.

    `rows_*` count input rows of this process's shard; `num_ok`, `num_failed` and `errors` count output rows (one per
    row and sample) of the whole output directory as this process saw it last.
    """

    output: str
    rows_total: int = 0
    rows_done: int = 0  # ended well or as an error, those found done at start included
    rows_reused: int = 0  # found done at start
    rows_saved: int = 0  # samples that were cut off and kept their tokens
    rows_continued: int = 0  # samples that continued after the tokens of an earlier run
    chunks_stolen: int = 0  # taken over from other shards
    rows_wasted: int = 0  # output rows of this process that another one had committed first
    num_ok: int = 0
    num_failed: int = 0
    errors: dict[str, int] = field(default_factory=dict)  # error_type -> output rows
    prompt_tokens: int = 0  # of this process
    output_tokens: int = 0  # of this process
    seconds: float = 0.0
    first_token_seconds: float | None = None  # from the start of the process's work to its first tokens
    max_error_rate: float = 0.01
    stopped_by: str | None = None  # what ended it early: everything is safe, run it again
    requeue: Requeue = field(default_factory=Requeue)  # what SLURM was asked for after a stop
    job_complete: bool = False  # all shards, not only this one
    rows_by_device: dict[str, int] = field(default_factory=dict)  # finished by each worker, where there are several
    warnings: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        if self.requeue.gave_up:
            return EngineError.exit_code
        if self.stopped_by is not None:
            return StoppedEarlyError.exit_code
        return InputDataError.exit_code if self.too_many_errors or self.input_damaged else 0

    @property
    def input_damaged(self) -> bool:
        """True if a compressed file broke off: the number of its rows is unknown."""
        return bool(self.errors.get("input_damaged"))

    @property
    def too_many_errors(self) -> bool:
        """True above the allowed share, and if every row failed: no job is meant to end so."""
        return self.num_failed > 0 and (not self.num_ok or self.num_failed > self.max_error_rate * self.num_output_rows)

    @property
    def num_output_rows(self) -> int:
        return self.num_ok + self.num_failed

    def take_counts(self, counts: Mapping[str, Any]) -> None:
        """Takes over the output row counts of a store, in their JSON form."""
        self.num_ok, self.num_failed, self.errors = counts["ok"], counts["error"], dict(counts["errors"])

    def render(self) -> str:
        done = self.rows_done
        lines = []
        if self.stopped_by is not None:
            lines.append(
                f"stopped early ({self.stopped_by}): {done:,} of {self.rows_total:,} rows are done and safe; "
                "run the same command again to go on"
            )
        else:
            what = "nothing to do" if self.rows_total and self.rows_reused == self.rows_total else "done"
            lines.append(f"{what}: {done:,} of {counted(self.rows_total, 'row')}")
        reused = f" ({self.rows_reused:,} done before)" if self.rows_reused else ""
        lines.append(f"  ok          {self.num_ok:,}{reused}")
        for kind, count in sorted(self.errors.items(), key=lambda item: -item[1]):
            lines.append(f"  failed      {count:,} {kind}")
        if self.seconds and self.output_tokens:
            first = self.first_token_seconds
            lines.append(
                f"  tokens      {self.prompt_tokens:,} in, {self.output_tokens:,} out in {duration(self.seconds)} "
                f"({self.output_tokens / self.seconds:,.1f} output tok/s)"
                + ("" if first is None else f"; the first after {duration(first)}, loading included")
            )
        if self.rows_by_device:
            lines.append(
                f"  devices     {', '.join(f'{name} {rows:,}' for name, rows in self.rows_by_device.items())} rows"
            )
        if self.requeue.message:
            lines.append(f"  slurm       {self.requeue.message}")
        if self.rows_continued:
            lines.append(f"  continued   {self.rows_continued:,} rows that an earlier run had begun")
        if self.rows_saved:
            lines.append(
                f"  begun       {self.rows_saved:,} unfinished rows; the next run continues after their tokens"
            )
        if self.chunks_stolen:
            lines.append(f"  stolen      {self.chunks_stolen:,} chunks of other shards")
        if self.rows_wasted:
            lines.append(f"  twice       {self.rows_wasted:,} rows that another process computed too; kept once")
        for warning in self.warnings:
            lines.append(f"  warning     {warning}")
        lines.append(f"  output      {self.output}/data")
        if not self.job_complete and self.stopped_by is None:
            lines.append("  note        other shards of this job still have rows to do: `batchjob status` shows them")
        literal = json.dumps(f"{self.output}/data", ensure_ascii=False)  # is Python, too
        code = f"import pyarrow.parquet as pq; print(pq.read_table({literal}).slice(0, 3).to_pylist())"
        lines.append(f"  read it     python -c {shlex.quote(code)}")
        lines.append(f"  or merge    batchjob merge {shlex.quote(self.output)} answers.jsonl")
        if self.input_damaged:
            lines.append("  exit 65     an input file is damaged and its last rows are missing: see error_message")
        if self.too_many_errors:
            lines.append(
                f"  exit 65     {self.num_failed:,} of {self.num_output_rows:,} rows failed, above --max-error-rate "
                f"{self.max_error_rate:g}; all rows are written, see error_type and error_message"
            )
        return "\n".join(lines)


def status_json(status: Status) -> dict[str, Any]:
    """Returns the object that `batchjob status --json` prints."""
    return {
        "complete": status.complete,
        "rows": status.num_rows,
        "rows_committed": status.num_rows_committed,
        "rows_logged": status.num_rows_logged,
        "rows_open": status.num_rows_open,
        "chunks": status.num_chunks,
        "chunks_committed": status.num_chunks_committed,
        **{f"output_{name}": value for name, value in status.counts.to_json().items()},
        "attempts": [{"id": a.attempt, "alive": a.alive, **a.record} for a in status.attempts],
        "warnings": status.warnings,
    }


def render_status(status: Status) -> str:
    """Returns the text that `batchjob status` prints."""
    done = status.num_rows - status.num_rows_open
    share = done / status.num_rows if status.num_rows else 1.0
    counts = status.counts
    lines = [
        f"{'complete' if status.complete else 'not complete'}: {done:,} of {status.num_rows:,} rows done ({share:.1%})",
        f"  in parts    {status.num_rows_committed:,} rows, {status.num_chunks_committed:,} of {status.num_chunks:,}",
        f"  in logs     {status.num_rows_logged:,} rows (safe, not yet in a part)",
        f"  ok          {counts.num_ok:,}",
    ]
    lines += [f"  failed      {number:,} {kind}" for kind, number in sorted(counts.errors.items(), key=lambda e: -e[1])]
    lines.append(f"  tokens      {counts.num_prompt_tokens:,} in, {counts.num_output_tokens:,} out")
    alive = [attempt for attempt in status.attempts if attempt.alive]
    lines.append(f"  processes   {len(alive)} running here, {len(status.attempts):,} started in all")
    lines += [f"  warning     {warning}" for warning in status.warnings]
    return "\n".join(lines)
