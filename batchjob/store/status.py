"""The state of a job as its output directory shows it. Nothing is written, so `status` may run beside the job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchjob.spec import refuse_url
from batchjob.store.attempts import is_alive, read_attempt
from batchjob.store.catalog import Catalog
from batchjob.store.chunk import OpenChunk
from batchjob.store.context import MemoryBudget, StoreContext
from batchjob.store.counts import RowCounts
from batchjob.store.creation import load_output
from batchjob.store.disk_errors import storage_errors
from batchjob.store.fsops import FsOps
from batchjob.store.manifest import Manifest
from batchjob.store.paths import Layout


@dataclass(frozen=True, slots=True)
class AttemptStatus:
    """One start of one process. `alive` is None where that cannot be told from here."""

    attempt: str
    alive: bool | None
    record: Mapping[str, Any]  # host, pid, started, and what the job noted


@dataclass(frozen=True, slots=True)
class Status:
    """Rows are input rows; `counts` are output rows, those in the logs of open chunks included."""

    manifest: Manifest
    num_rows: int
    num_chunks: int
    num_chunks_committed: int
    num_rows_committed: int
    num_rows_logged: int  # complete in the logs of chunks that have no part yet
    counts: RowCounts
    attempts: list[AttemptStatus] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def num_rows_open(self) -> int:
        return self.num_rows - self.num_rows_committed - self.num_rows_logged

    @property
    def complete(self) -> bool:
        return self.num_chunks_committed == self.num_chunks

    def to_dict(self) -> dict[str, Any]:
        """The status as JSON values."""
        return {
            "job_id": self.manifest.job_id,
            "complete": self.complete,
            "rows": {
                "total": self.num_rows,
                "committed": self.num_rows_committed,
                "logged": self.num_rows_logged,
                "open": self.num_rows_open,
            },
            "parts": {"total": self.num_chunks, "committed": self.num_chunks_committed},
            "output_rows": self.counts.to_json(),
            "attempts": [{"attempt": a.attempt, "alive": a.alive, **a.record} for a in self.attempts],
            "warnings": self.warnings,
        }

    def render(self) -> str:
        """The status as a few lines for a person."""
        done = self.num_rows_committed + self.num_rows_logged
        share = done / self.num_rows if self.num_rows else float(self.complete)
        state = "complete" if self.complete else "not complete"
        parts = f"{self.num_chunks_committed:,} of {self.num_chunks:,} parts"
        lines = [
            f"{state}: {done:,} of {self.num_rows:,} rows finished ({share:.1%})",
            f"  in parts       {self.num_rows_committed:,} rows, {parts}",
            f"  in logs        {self.num_rows_logged:,} rows of chunks that are still open",
            f"  open           {self.num_rows_open:,} rows",
            f"  output rows    {self.counts.num_ok:,} ok, {self.counts.num_error:,} failed",
            *(f"    {kind:<13}{number:,}" for kind, number in sorted(self.counts.errors.items())),
            f"  output tokens  {self.counts.num_output_tokens:,}",
        ]
        running = [a for a in self.attempts if a.alive]
        unknown = sum(a.alive is None for a in self.attempts)
        lines.append(
            f"  attempts       {len(self.attempts)}, running here: {len(running)}"
            + (f", on other machines or boots: {unknown}" if unknown else "")
        )
        lines += [f"    {a.attempt} (process {a.record.get('pid')})" for a in running]
        lines += [f"warning: {warning}" for warning in self.warnings]
        return "\n".join(lines)


def job_status(output: str | Path, *, fs: FsOps | None = None) -> Status:
    """Reads the status of a job. Raises UsageError if the directory holds none, StorageError."""
    fs = fs or FsOps()
    refuse_url(output, "OUTPUT")
    output = Path(output).absolute()
    manifest, plan = load_output(fs, output)
    layout = Layout(output)
    # No row need be kept to be counted; nothing here writes, so the attempt needs no name.
    context = StoreContext(fs, layout, manifest, attempt="status", memory=MemoryBudget(limit=0))
    warnings: list[str] = []
    catalog = Catalog(context, plan, warnings, repair=False)
    committed = catalog.scan()
    counts = RowCounts()
    counts.add(catalog.totals)
    num_logged = 0
    with storage_errors("reading", layout.state):
        for name in sorted(fs.listdir(layout.wal)):
            if not name.isdigit() or int(name) in committed or int(name) not in catalog:
                continue
            chunk = OpenChunk(context, catalog.chunk(int(name)))
            num_logged += len(chunk.complete_rows())
            counts.add(chunk.counts)
            if chunk.num_bad:
                warnings.append(f"{chunk.num_bad} damaged records in the logs of chunk {int(name)}")
            chunk.close()
        attempts = [
            _attempt(fs, layout, name) for name in sorted(fs.listdir(layout.attempts)) if name.endswith(".json")
        ]
    return Status(
        manifest=manifest,
        num_rows=plan.num_rows,
        num_chunks=len(catalog.chunks),
        num_chunks_committed=len(committed),
        num_rows_committed=sum(catalog.chunk(index).num_rows for index in committed),
        num_rows_logged=num_logged,
        counts=counts,
        attempts=attempts,
        warnings=warnings,
    )


def _attempt(fs: FsOps, layout: Layout, name: str) -> AttemptStatus:
    record = read_attempt(fs, layout.attempts / name)
    return AttemptStatus(name.removesuffix(".json"), is_alive(record), record or {})
