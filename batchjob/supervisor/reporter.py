"""`Voice`: what a person sees of several workers: one header, one progress line, and lines that name their device."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

from batchjob.job.observer import LOAD, START
from batchjob.report.progress import Counts, Progress
from batchjob.spec import JobSpec
from batchjob.supervisor.replica import Lane
from batchjob.supervisor.row_counts import Tally


class Voice:
    def __init__(
        self, spec: JobSpec, names: Sequence[str], is_own: Callable[[int], bool], echo: Callable[[str], None]
    ) -> None:
        """`names` of the devices; `is_own` says of the index of a chunk whether it is of the command's shard."""
        self.tally = Tally(is_own)
        self._mode = spec.progress
        self._names = names
        self._echo = echo
        self._said: set[str] = set()
        self._has_header = False
        self._counts = Counts()
        self._progress: Progress | None = None
        self._rows_reused = 0  # that the progress knows of
        self._began: float | None = None

    def print(self, line: str) -> None:
        """On a terminal the last line is the bar's: what we say goes below it."""
        self._echo(f"\n{line}" if self._progress is not None and sys.stderr.isatty() else line)

    def said(self, lane: Lane, phase: str, line: str) -> None:
        """Before the model is loaded it is about the job, and all of them find the same; later about the device."""
        if phase == START:
            self._once(line)
        elif phase != LOAD or lane.num_restarts:
            self.print(f"{lane.name}: {line}")
        elif line.startswith("loading ") and not any(said.startswith("loading ") for said in self._said):
            self._once(f"{line.rpartition(' on ')[0]} on {', '.join(self._names)})")
        elif not line.startswith("loading "):
            self._once(line)

    def header(self, lane: Lane, lines: Sequence[str]) -> None:
        """Of whoever has loaded first, and once; then only of those that were started again."""
        engine, *others = lines
        if not self._has_header:
            self._has_header = True
            for line in (engine, f"devices   {len(self._names)}: {', '.join(self._names)}", *others):
                self._once(line)
        elif lane.num_restarts:
            self.print(f"{lane.name}: {engine}")

    def _once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self.print(line)

    # -- progress

    def begin(self) -> None:
        """A worker has loaded and makes its first step."""
        if self._began is None:
            self._began = time.monotonic()

    def show(self, lanes: Sequence[Lane]) -> None:
        if self._began is None:
            return
        counts, tally = self._counts, self.tally
        counts.rows_total, counts.rows_done = tally.rows_total, tally.rows_done
        counts.rows_failed = sum(lane.num_failed for lane in lanes)
        counts.prompt_tokens = sum(lane.prompt_tokens for lane in lanes)
        counts.output_tokens = sum(lane.output_tokens for lane in lanes)
        journals = [lane.attempt.journal for lane in lanes if lane.attempt is not None]
        counts.num_running = sum(journal.num_running for journal in journals)
        counts.num_waiting = sum(journal.num_waiting for journal in journals)
        if self._progress is None:
            self._progress = Progress(counts, mode=self._mode, echo=self._echo)
        elif tally.rows_reused > self._rows_reused:
            self._progress.reused(tally.rows_reused - self._rows_reused)
        self._rows_reused = tally.rows_reused
        self._progress.update()

    @property
    def seconds(self) -> float:
        """Since the first step; 0 before it."""
        return 0.0 if self._began is None else time.monotonic() - self._began

    def close(self) -> None:
        if self._progress is not None:
            self._progress.close()
            self._progress = None
