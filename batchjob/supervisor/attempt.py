"""`Attempt`: a worker from its start to its end, held to its deadlines."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping

from batchjob.job.observer import LOAD, RUN, START, RestartHints, Team
from batchjob.job.stop import StopSignals
from batchjob.notes import write_note
from batchjob.spec import JobSpec
from batchjob.supervisor.oom import num_memory_kills
from batchjob.supervisor.protocol import Kind, Lost, StopOrder
from batchjob.supervisor.restart_policy import AttemptEnd
from batchjob.supervisor.worker_process import WorkerProcess
from batchjob.supervisor.worker_state import Listener, WorkerState

GRACE = 3.0  # seconds after a deadline before the worker is killed: SIGTERM means 15, and 20 must not be passed
GRACE_WARNED = 30.0  # the same for an announced end, which leaves a minute: a long step, the last tokens, a requeue
GRACE_NOW = 2.0  # the same when the job is to end at once
END_WAIT = 10.0  # seconds that a worker may take to end after it has told how it ends
_TICK = 1.0  # seconds at most between two looks around
_SHORT_TICK = 0.02  # the same while a worker ends
_STACKS_TICK = 0.1  # the same while it writes its stacks
_LONG_TICK = 2.0  # a longer one means that this process was stopped too, and nothing can be said about the worker
_MAX_SHOWN = 16_384  # characters of stacks that are printed


class StopNotice:
    """Tells a person of a stop, once for all workers."""

    def __init__(self, echo: Callable[[str], None]) -> None:
        self._echo = echo
        self._is_told = self._is_told_now = False

    def tell(self, order: StopOrder) -> None:
        if order.now and not self._is_told_now:
            self._is_told_now = True
            self._echo("stopping now")
        elif not self._is_told:
            seconds = max(0.0, order.deadline - time.monotonic())
            more = "; press Ctrl-C again to stop now" if order.reason == "SIGINT" else ""
            self._echo(f"{order.reason}: running rows may finish within {seconds:.0f} s, nothing new{more}")
        self._is_told = True


class Attempt:
    """`poll` it until it has ended, whenever there is something to read from `fileno` and at least every `patience()`
    seconds. Then `exit_code` and `exit_message` are those of a worker that ended itself, else None and empty.
    `worker_state` is what its messages tell.
    """

    def __init__(
        self,
        spec: JobSpec,
        hints: RestartHints,
        team: Team,
        stop: StopSignals,
        notice: StopNotice,
        echo: Callable[[str], None],
        *,
        debug: bool,
        environ: Mapping[str, str] | None = None,
        listener: Listener | None = None,
    ) -> None:
        self._stop = stop
        self._notice = notice
        self._echo = echo
        self._timeouts = {LOAD: spec.load_timeout, RUN: spec.stall_timeout}
        suspects = {*hints.poisoned, *(row for group in hints.suspects for row in group)}
        self.worker_state = WorkerState(suspects, listener)
        self.exit_code: int | None = None
        self.exit_message = ""
        self._memory_kills = num_memory_kills()
        self._process = WorkerProcess(spec, hints, team, debug=debug, environ=environ)
        self._gone_by: float | None = None  # set once no more messages will come
        self._last_news = self._last_tick = time.monotonic()
        self._told: StopOrder | None = None
        self._kill_at = float("inf")
        self._hang: str | None = None

    def poll(self) -> AttemptEnd | None:
        """Takes in the worker's messages, and keeps its deadlines. Returns how it ended, once it has."""
        if self._gone_by is None:
            if self._hear():
                self._look_around()
                return None
            self._gone_by = time.monotonic() + END_WAIT
        code = self._process.wait(0)
        if code is None and time.monotonic() < self._gone_by:
            return None
        return self._end(code)

    def fileno(self) -> int | None:
        """Returns a descriptor that is readable when there is a message; None when no more will come."""
        return self._process.fileno() if self._gone_by is None else None

    def patience(self) -> float:
        """Returns the seconds until the next `poll`."""
        if self._gone_by is not None:
            return _SHORT_TICK
        longest = _TICK if self._hang is None else _STACKS_TICK
        return min(longest, max(_SHORT_TICK, self._kill_at - time.monotonic()))

    def tell_lost(self, member: int) -> None:
        self._process.tell(Lost(member))

    def kill(self) -> None:
        self._kill_at = 0.0
        self._process.kill()

    def close(self) -> None:
        """Ends the worker, if it has not ended, and closes its pipes."""
        self._process.close()

    def _hear(self) -> bool:
        """Takes in the worker's messages. Returns False once no more will come."""
        is_gone = self._process.wait(0) is not None  # asked first: what it wrote before that is still there to read
        data = self._process.read()
        if data is None or (is_gone and not data):
            return False
        if data:
            self._last_news = time.monotonic()
            self.worker_state.feed(data)
        return self.worker_state.end is None

    def _look_around(self) -> None:
        now = time.monotonic()
        if now - self._last_tick > _LONG_TICK:
            self._last_news += now - self._last_tick
        self._last_tick = now
        if self._stop.stopping:
            self._pass_on_the_stop()
        if self._hang is not None and self._process.has_answered():
            self._kill_at = 0.0
        elif self._hang is None and now < self._kill_at:
            self._watch(now)
        if now >= self._kill_at:
            self._process.kill()

    # -- signals

    def _pass_on_the_stop(self) -> None:
        stop = self._stop
        assert stop.reason is not None
        order = StopOrder(stop.reason, stop.deadline, stop.now, stop.warned)
        if self.worker_state.phase in (START, LOAD):
            self._kill_at = 0.0  # there is nothing to finish, and a model that loads cannot be interrupted otherwise
        elif order != self._told:
            self._process.tell(order)
            self._notice.tell(order)
            is_shortened = self._told is not None and stop.deadline < self._told.deadline  # by SIGTERM
            grace = GRACE_WARNED if stop.warned and not is_shortened else GRACE
            self._kill_at = min(stop.deadline + grace, time.monotonic() + GRACE_NOW if stop.now else float("inf"))
        self._told = order

    # -- the watchdog

    def _watch(self, now: float) -> None:
        timeout = self._timeouts.get(self.worker_state.phase, 0.0)
        silence = now - self._last_news
        if not timeout or silence < timeout:
            return
        doing = "loading the model" if self.worker_state.phase == LOAD else "making a step"
        self._hang = f"hung: {silence:.0f} s without {doing}"
        self._process.ask_for_stacks()

    # -- the end

    def _end(self, code: int | None) -> AttemptEnd:
        """`code` is None for a worker that has told how it ends and does not."""
        worker = self.worker_state
        kind, how = self._kind_and_how(code)
        if kind is not Kind.EXIT:
            self._keep_stacks()
        return AttemptEnd(
            kind,
            how,
            in_flight=tuple(worker.in_flight),
            newest=worker.newest,
            cleared=frozenset(worker.cleared),
            num_finished=worker.num_finished,
            has_computed=worker.has_computed,
            signal=-code if code is not None and code < 0 else None,
        )

    def _kind_and_how(self, code: int | None) -> tuple[Kind, str]:
        if self.worker_state.end is not None:
            kind, exit_code, message = self.worker_state.end
            if kind is Kind.EXIT:
                self.exit_code, self.exit_message = exit_code, message
            return kind, f"failed: {message}"
        if self._hang is not None:
            return Kind.HANG, self._hang
        if code is None or code >= 0:
            return Kind.CRASH, f"ended without a word, with exit code {code}"
        name = signal_name(-code)
        if -code == signal.SIGKILL and num_memory_kills() > self._memory_kills:
            return Kind.MEMORY, f"was killed by {name}, by the kernel for want of memory"
        return Kind.CRASH, f"was killed by {name}"

    def _keep_stacks(self) -> None:
        worker = self.worker_state
        stacks = self._process.stacks()
        if not stacks:
            if self._hang is not None:
                self._echo("the worker did not answer with its stacks: it is stuck in the kernel, or was stopped")
            return
        where = ""
        if worker.attempt is not None and worker.directory is not None:
            path = worker.directory / f"{worker.attempt}.stacks"
            try:
                write_note(path, f"{stacks}\n")
                where = f" (kept in {path})"
            except OSError as error:
                where = f" (not kept: {error})"
        self._echo(f"stacks of the worker{where}:\n{stacks[:_MAX_SHOWN]}")


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
