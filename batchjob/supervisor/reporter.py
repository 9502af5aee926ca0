"""`Reporter`: all that a person sees of a command's workers: one header, one progress line, and lines that name their
device where there are several."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from batchjob.job.observer import LOAD, START, in_shard
from batchjob.report.progress import Progress, ProgressCounts
from batchjob.spec import JobSpec
from batchjob.supervisor.job_rows import JobRows

if TYPE_CHECKING:
    from batchjob.supervisor.replica import Replica


class Reporter:
    def __init__(self, spec: JobSpec, names: Sequence[str], echo: Callable[[str], None]) -> None:
        """`names` of the devices."""
        self.rows = JobRows(lambda chunk_index: in_shard(spec, chunk_index))
        self._mode = spec.progress
        self._names = names
        self._echo = echo
        self._printed: set[str] = set()  # lines that are printed once, whichever worker finds them
        self._has_header = False
        self._counts = ProgressCounts()
        self._progress: Progress | None = None
        self._rows_reused = 0  # that the progress knows of
        self._began: float | None = None
        self._ended: float | None = None

    def print(self, line: str) -> None:
        if self._progress is not None:
            self._progress.clear()
        self._echo(line)

    def labelled(self, replica: Replica, line: str) -> str:
        return line if len(self._names) == 1 else f"{replica.name}: {line}"

    def said(self, replica: Replica, phase: str, line: str) -> None:
        """Prints a worker's line. Before the model is loaded it is about the job, and all workers find the same; later
        it is about the device."""
        is_loading = line.startswith("loading ")
        if len(self._names) == 1 or (phase != START and (phase != LOAD or replica.num_restarts)):
            replica.echo(line)
        elif phase == START or not is_loading:
            self._print_once(line)
        elif not any(printed.startswith("loading ") for printed in self._printed):
            self._print_once(f"{line.rpartition(' on ')[0]} on {', '.join(self._names)})")

    def header(self, replica: Replica, lines: Sequence[str]) -> None:
        """Prints the header of the replica that has loaded first; later only the engine's line of restarted ones."""
        engine, *others = lines
        if not self._has_header:
            self._has_header = True
            devices = [f"devices   {len(self._names)}: {', '.join(self._names)}"] if len(self._names) > 1 else []
            for line in (engine, *devices, *others):
                self._print_once(line)
        elif replica.num_restarts:
            replica.echo(engine)

    def _print_once(self, line: str) -> None:
        if line not in self._printed:
            self._printed.add(line)
            self.print(line)

    # -- progress

    def begin(self) -> None:
        """A worker has loaded and begins its first step."""
        if self._began is None:
            self._began = time.monotonic()

    def end(self) -> None:
        """A worker has made its last step."""
        self._ended = time.monotonic()

    def show(self, replicas: Sequence[Replica]) -> None:
        if self._began is None:
            return
        counts, rows = self._counts, self.rows
        counts.rows_total, counts.rows_done = rows.rows_total, rows.rows_done
        counts.rows_failed = sum(replica.rows_failed for replica in replicas)
        counts.prompt_tokens = sum(replica.prompt_tokens for replica in replicas)
        counts.output_tokens = sum(replica.output_tokens for replica in replicas)
        running = [replica.attempt.worker_state for replica in replicas if replica.attempt is not None]
        counts.num_running = sum(worker.num_running for worker in running)
        counts.num_waiting = sum(worker.num_waiting for worker in running)
        if self._progress is None:
            self._progress = Progress(counts, mode=self._mode, echo=self._echo)
        elif rows.rows_reused > self._rows_reused:
            self._progress.reused(rows.rows_reused - self._rows_reused)
        self._rows_reused = rows.rows_reused
        self._progress.update()

    @property
    def seconds(self) -> float:
        """Seconds from the first step to the last; 0 before the first."""
        return 0.0 if self._began is None else (self._ended or time.monotonic()) - self._began

    def close(self) -> None:
        if self._progress is not None:
            self._progress.close()
            self._progress = None
