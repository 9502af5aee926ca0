"""The worker process of a supervisor: `python -m batchjob.supervisor.worker`, with its orders on standard input.

It runs the job like any process does, reports to its supervisor and prints nothing but tracebacks itself, and is gone
within a second of the supervisor's death. Signals are the supervisor's; a stop comes as an order.
"""

from __future__ import annotations

import faulthandler
import json
import os
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchjob.child_process import die_with_parent, listen, receive, take_standard_input
from batchjob.errors import BatchJobError, EngineError, FeederError, UnsupportedModelError
from batchjob.job.observer import RUN, START, RunObserver, in_shard
from batchjob.job.stop import StopSignals
from batchjob.supervisor.protocol import Kind, Lost, Orders, StopOrder, end_line, rows_line
from batchjob.supervisor.worker_process import STACKS_SIGNAL

if TYPE_CHECKING:
    from batchjob.core.step_plan import StepPlan
    from batchjob.job.observer import Team
    from batchjob.plan import Chunk
    from batchjob.report.progress import ProgressCounts
    from batchjob.report.result import RunResult
    from batchjob.spec import JobSpec
    from batchjob.store.store import Store

ALIVE_INTERVAL = 0.5  # seconds between two signs of life: a stall timeout may be a second
_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory")
_DEVICE = ("cuda error", "cudnn error", "nccl error", "no cuda gpus are available")


class OrderedStop(StopSignals):
    """A stop that the supervisor orders. No signal is handled here."""

    def __init__(self) -> None:
        super().__init__(lambda: 0.0)

    def __enter__(self) -> OrderedStop:
        return self

    def take(self, order: StopOrder) -> None:
        self.warned = order.warned
        self.deadline = order.deadline
        self.now = order.now
        self.reason = self.reason or order.reason


class PipeObserver(RunObserver):
    """Writes to the supervisor, which prints for all workers. A line is one write, and comes before the step that may
    crash, so it can be read after a crash."""

    def __init__(self, orders: Orders, stop: OrderedStop) -> None:
        self.hints = orders.hints
        self.asked: JobSpec = orders.team.asked
        self.team = orders.team if orders.team.size > 1 else None
        self.current_phase = START
        self._fd = orders.report_fd
        self._stop = stop
        self._in_flight: set[int] = set()
        self._finished: list[int] = []
        self._next_alive = 0.0
        self._counts: ProgressCounts | None = None
        self._left: list[dict[str, Any]] = []
        self._is_shard_in_parts = False
        self._sending = threading.Lock()

    def stop(self, signals: StopSignals) -> StopSignals:
        return self._stop

    def attempt(self, name: str, directory: Path) -> None:
        self.send(f"attempt {json.dumps([name, str(directory)])}\n")

    def phase(self, name: str) -> None:
        self.current_phase = name
        self._tell_finished()
        self.send(f"phase {name}\n")

    @property
    def before_step(self) -> Callable[[StepPlan], None]:
        return self._tell_admitted

    def _tell_admitted(self, plan: StepPlan) -> None:
        """Reports the rows that are new to the engine. They are in the prefill part of a plan, whatever is cached."""
        prefills = plan.slices[plan.num_decodes :]
        if not prefills:
            return
        in_flight = self._in_flight
        rows = {piece.seq.request.row_index: None for piece in prefills}
        new = [row for row in rows if row not in in_flight]
        if new:
            in_flight.update(new)
            self._tell_finished()
            self.send(rows_line("+", new))

    def finished(self, row_index: int) -> None:
        self._in_flight.discard(row_index)
        self._finished.append(row_index)

    def alive(self, prompt_tokens: int, output_tokens: int) -> None:
        now = time.monotonic()
        if now >= self._next_alive or self._finished:
            self._tell_finished()
            self._next_alive = now + ALIVE_INTERVAL
            counts = self._counts
            more = "" if counts is None else f" {counts.rows_failed} {counts.num_running} {counts.num_waiting}"
            self.send(f". {prompt_tokens} {output_tokens}{more}\n")

    def _tell_finished(self) -> None:
        if self._finished:
            self.send(rows_line("-", self._finished))
            self._finished.clear()

    def follow(self, counts: ProgressCounts) -> None:
        self._counts = counts

    def say(self, line: str) -> None:
        self.send(f"say {json.dumps(line)}\n")

    def header(self, lines: Sequence[str], echo: Callable[[str], None]) -> None:
        self.send(f"header {json.dumps(list(lines))}\n")

    def share(self, chunks: Iterable[Chunk], committed: Collection[int] | None) -> None:
        mine = [chunk for chunk in chunks if in_shard(self.asked, chunk.index)]
        num_done = sum(chunk.num_rows for chunk in mine if committed is None or chunk.index in committed)
        self.send(f"share {sum(chunk.num_rows for chunk in mine)} {num_done}\n")

    def opened(self, chunk: Chunk, num_complete: int) -> None:
        self._tell_finished()
        self.send(f"chunk {chunk.index} {chunk.row_index} {chunk.num_rows} {num_complete}\n")

    def counted(self, store: Store) -> None:
        self._left = [store.committed_counts().to_json(), store.open_counts().to_json()]
        committed = store.committed()
        self._is_shard_in_parts = all(
            chunk.index in committed for chunk in store.plan.chunks if in_shard(self.asked, chunk.index)
        )

    def result(self, result: RunResult, echo: Callable[[str], None]) -> None:
        self._tell_finished()
        in_parts, in_open = self._left or ({}, {})
        message = {"result": asdict(result), "parts": in_parts, "open": in_open, "complete": self._is_shard_in_parts}
        self.send(f"result {json.dumps(message)}\n")

    def send(self, line: str) -> None:
        data = line.encode()
        try:
            with self._sending:
                while data:
                    data = data[os.write(self._fd, data) :]
        except OSError:
            os._exit(1)  # the supervisor is gone


def main() -> None:
    messages = take_standard_input()
    orders: Orders = receive(messages)
    die_with_parent(orders.parent_pid)
    faulthandler.enable(orders.stacks_fd)
    faulthandler.register(STACKS_SIGNAL, orders.stacks_fd)
    stop = OrderedStop()
    listen(messages, partial(_take_message, stop, orders.team))
    observer = PipeObserver(orders, stop)
    kind, code, message = _run(orders, observer)
    observer.phase("end")
    observer.send(end_line(kind, code, message))
    os._exit(code)  # not through the interpreter's end, where native libraries at times crash or hang


def _take_message(stop: OrderedStop, team: Team, message: StopOrder | Lost) -> None:
    if isinstance(message, StopOrder):
        stop.take(message)
    else:
        team.lost.add(message.member)


def _run(orders: Orders, observer: PipeObserver) -> tuple[Kind, int, str]:
    from batchjob.job.run import run

    try:
        return Kind.EXIT, run(orders.spec, echo=observer.say, observer=observer).exit_code, ""
    except Exception as error:
        kind = classify(error, observer.current_phase)
        code = error.exit_code if isinstance(error, BatchJobError) else 1
        if orders.debug or not isinstance(error, BatchJobError):
            traceback.print_exc()
        return kind, code, f"{error}" if isinstance(error, BatchJobError) else f"{type(error).__name__}: {error}"


def classify(error: Exception, phase: str) -> Kind:
    """Tells by the error that ended an attempt whether another attempt may do better."""
    is_engine = isinstance(error, EngineError) and not isinstance(error, UnsupportedModelError | FeederError)
    if isinstance(error, BatchJobError) and not is_engine:
        return Kind.EXIT
    cause: BaseException | None = error
    while cause is not None:
        text, name = str(cause).lower(), type(cause).__name__
        if name in ("MemoryError", "OutOfMemoryError") or any(sign in text for sign in _MEMORY):
            return Kind.MEMORY
        if any(sign in text for sign in _DEVICE):
            return Kind.DEVICE
        cause = cause.__cause__ or cause.__context__
    return Kind.CRASH if phase == RUN and is_engine else Kind.EXIT


if __name__ == "__main__":
    main()
