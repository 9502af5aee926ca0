"""One attempt: a worker from its start to its end, its deadlines kept."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from batchjob.signals import StopSignals
from batchjob.spec import JobSpec
from batchjob.supervisor.journal import Journal
from batchjob.supervisor.memory import num_memory_kills
from batchjob.supervisor.messages import Kind, StopOrder
from batchjob.supervisor.policy import AttemptEnd
from batchjob.supervisor.process import WorkerProcess
from batchjob.supervisor.wakeup import Wakeup
from batchjob.watch import LOAD, RUN, START, Assignment

GRACE = 3.0  # seconds after a deadline before the worker is killed: SIGTERM means 15, and 20 must not be passed
GRACE_WARNED = 30.0  # the same for an announced end, which leaves a minute: for a long step, the last tokens, a requeue
GRACE_NOW = 2.0  # the same when everything is to end at once
LAST_WORDS = 10.0  # seconds that a worker may take to be gone after it has said how it ends
_TICK = 1.0  # seconds at most between two looks around
_LONG_TICK = 2.0  # a longer one means that this process was stopped too, and nothing can be said about the worker
_MAX_SHOWN = 16_384  # characters of stacks that are printed


class Attempt:
    """`run` it once. Then `exit_code` is that of a worker that ended itself, else None; `journal` is what it said."""

    def __init__(
        self,
        spec: JobSpec,
        assignment: Assignment,
        stop: StopSignals,
        wakeup: Wakeup,
        echo: Callable[[str], None],
        *,
        debug: bool,
    ) -> None:
        self._stop = stop
        self._wakeup = wakeup
        self._echo = echo
        self._timeouts = {LOAD: spec.load_timeout, RUN: spec.stall_timeout}
        self.journal = Journal({*assignment.condemned, *(row for group in assignment.suspects for row in group)})
        self.exit_code: int | None = None
        self._memory_kills = num_memory_kills()
        self._worker = WorkerProcess(spec, assignment, debug=debug)
        self._last_news = self._last_tick = time.monotonic()
        self._told: StopOrder | None = None
        self._kill_at = float("inf")
        self._hang: str | None = None

    def run(self) -> AttemptEnd:
        try:
            while self._hear():
                self._look_around()
                self._wakeup.wait(self._worker.fileno(), min(_TICK, self._kill_at - time.monotonic()))
            return self._end(self._worker.wait(LAST_WORDS))
        finally:
            self._worker.close()

    def _hear(self) -> bool:
        """Takes in what the worker has said. False once it is gone, or has nothing more to say."""
        is_gone = self._worker.wait(0) is not None  # asked first: what it said before that is still there to read
        data = self._worker.read()
        if data is None or (is_gone and not data):
            return False
        if data:
            self._last_news = time.monotonic()
            self.journal.feed(data)
        return self.journal.end is None

    def _look_around(self) -> None:
        now = time.monotonic()
        if now - self._last_tick > _LONG_TICK:
            self._last_news += now - self._last_tick
        self._last_tick = now
        if self._stop.stopping:
            self._pass_on_the_stop()
        if self._hang is None and now < self._kill_at:
            self._watch(now)
        if now >= self._kill_at:
            self._worker.kill()

    # -- signals

    def _pass_on_the_stop(self) -> None:
        stop = self._stop
        assert stop.reason is not None
        order = StopOrder(stop.reason, stop.deadline, stop.now, stop.warned)
        if self.journal.phase in (START, LOAD):
            self._kill_at = 0.0  # there is nothing to finish, and a model that loads cannot be interrupted otherwise
        elif order != self._told:
            self._worker.stop(order)
            self._say(order)
            is_shortened = self._told is not None and stop.deadline < self._told.deadline  # by SIGTERM
            grace = GRACE_WARNED if stop.warned and not is_shortened else GRACE
            self._kill_at = min(stop.deadline + grace, time.monotonic() + GRACE_NOW if stop.now else float("inf"))
        self._told = order

    def _say(self, order: StopOrder) -> None:
        if order.now:
            self._echo("stopping now")
        elif self._told is None:
            seconds = max(0.0, order.deadline - time.monotonic())
            more = "; press Ctrl-C again to stop now" if order.reason == "SIGINT" else ""
            self._echo(f"{order.reason}: running rows may finish within {seconds:.0f} s, nothing new{more}")

    # -- the watchdog

    def _watch(self, now: float) -> None:
        timeout = self._timeouts.get(self.journal.phase, 0.0)
        silence = now - self._last_news
        if not timeout or silence < timeout:
            return
        doing = "loading the model" if self.journal.phase == LOAD else "making a step"
        self._hang = f"hung: {silence:.0f} s without {doing}"
        self._worker.ask_for_stacks()
        self._kill_at = 0.0

    # -- the end

    def _end(self, code: int | None) -> AttemptEnd:
        """`code` is None for a worker that has said its last and does not go."""
        journal = self.journal
        kind, how = self._kind_and_how(code)
        if kind is not Kind.EXIT:
            self._keep_stacks()
        return AttemptEnd(
            kind,
            how,
            in_flight=tuple(journal.in_flight),
            newest=journal.newest,
            cleared=frozenset(journal.cleared),
            num_finished=journal.num_finished,
            has_computed=journal.has_computed,
            signal=-code if code is not None and code < 0 else None,
        )

    def _kind_and_how(self, code: int | None) -> tuple[Kind, str]:
        if self.journal.end is not None:
            kind, exit_code, message = self.journal.end
            if kind is Kind.EXIT:
                self.exit_code = exit_code
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
        journal = self.journal
        stacks = self._worker.stacks()
        if not stacks:
            if self._hang is not None:
                self._echo("the worker did not answer with its stacks: it is stuck in the kernel, or was stopped")
            return
        where = ""
        if journal.attempt is not None and journal.directory is not None:
            path = journal.directory / f"{journal.attempt}.stacks"
            try:
                path.write_text(f"{stacks}\n")
                where = f" (kept in {path})"
            except OSError as error:
                where = f" (not kept: {error})"
        self._echo(f"stacks of the worker{where}:\n{stacks[:_MAX_SHOWN]}")


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
