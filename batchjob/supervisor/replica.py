"""`Lane`: the workers of one device, one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable

from batchjob.job.devices import Device
from batchjob.job.observer import Assignment, Team
from batchjob.job.stop_signals import StopSignals
from batchjob.job.time_limit import parse_duration
from batchjob.spec import JobSpec
from batchjob.supervisor.attempt import Attempt, StopNotice
from batchjob.supervisor.restart_policy import AttemptEnd, Policy
from batchjob.supervisor.worker_state import Listener


class Lane:
    """`start` a worker, `poll` it until it has ended, then `note` the end and start again, or give up.

    The numbers are those of all its workers.
    """

    def __init__(
        self,
        spec: JobSpec,
        device: Device,
        echo: Callable[[str], None],
        *,
        debug: bool,
        team: Team | None = None,
        listener: Listener | None = None,
    ) -> None:
        self.name = device.name
        self.policy = Policy()
        self.num_restarts = 0
        self.attempt: Attempt | None = None
        self.exit_code: int | None = None  # of a worker that ended itself, for the reason in `exit_message`
        self.exit_message = ""
        self._spec = spec
        self._device = device
        self._echo = echo
        self._debug = debug
        self._team = team
        self._listener = listener
        self._last: AttemptEnd | None = None
        self._rows_finished = self._prompt_tokens = self._output_tokens = self._num_failed = 0
        self._started = time.monotonic()

    def start(self, stop: StopSignals, notice: StopNotice) -> None:
        self.attempt = Attempt(
            self.worker_spec(),
            self._assignment(),
            stop,
            notice,
            self._echo,
            debug=self._debug,
            team=self._team,
            environ=self._device.environ,
            listener=self._listener,
        )

    def poll(self) -> AttemptEnd | None:
        assert self.attempt is not None
        end = self.attempt.poll()
        if end is not None:
            self._rows_finished, self._prompt_tokens, self._output_tokens = self._totals()
            self._num_failed = self.num_failed
            self.exit_code = self.attempt.exit_code
            if self.attempt.journal.end is not None:
                self.exit_message = self.attempt.journal.end[2]
            self.close()
        return end

    def note(self, end: AttemptEnd) -> str | None:
        """How it goes on, for a person; None if it does not, and `policy.gave_up` says why."""
        self._last = end
        remedy = self.policy.note(end)
        if self.policy.gave_up is not None:
            return None
        self.num_restarts += 1
        return f"restart {self.num_restarts}: the worker {end.how}; {remedy}"

    def close(self) -> None:
        if self.attempt is not None:
            self.attempt.close()
            self.attempt = None

    # -- orders

    def worker_spec(self) -> JobSpec:
        """A time limit goes on counting through restarts, and while a lane waits for its first start."""
        spec = self._spec
        spent = time.monotonic() - self._started
        if spec.time_limit in ("auto", "none") or (not self.num_restarts and spent < 1):
            return spec
        return spec.replace(time_limit=f"{max(1, round(parse_duration(spec.time_limit) - spent))}s")

    def _assignment(self) -> Assignment:
        """A worker of a team does not speak for the command, so it need not know what was done before."""
        alone = self._team is None
        return self.policy.assignment(
            restarts=self.num_restarts,
            last_end=None if self._last is None else self._last.how,
            rows_finished=self._rows_finished if alone else 0,
            prompt_tokens=self._prompt_tokens if alone else 0,
            output_tokens=self._output_tokens if alone else 0,
            seconds=time.monotonic() - self._started if alone and self.num_restarts else 0.0,
        )

    # -- numbers

    def _totals(self) -> tuple[int, int, int]:
        before = (self._rows_finished, self._prompt_tokens, self._output_tokens)
        if self.attempt is None:
            return before
        journal = self.attempt.journal
        now = (journal.num_finished, journal.prompt_tokens, journal.output_tokens)
        return before[0] + now[0], before[1] + now[1], before[2] + now[2]

    @property
    def rows_finished(self) -> int:
        return self._totals()[0]

    @property
    def prompt_tokens(self) -> int:
        return self._totals()[1]

    @property
    def output_tokens(self) -> int:
        return self._totals()[2]

    @property
    def num_failed(self) -> int:
        return self._num_failed + (0 if self.attempt is None else self.attempt.journal.num_failed)


def gave_up_message(reason: str, end: AttemptEnd) -> str:
    return (
        f"gave up: {reason}; finished rows are safe. The last worker {end.how}"
        + (f" ({len(end.in_flight)} rows in the engine)" if end.in_flight else " (no row in the engine)")
        + ". Run with --no-supervisor to see it come down"
    )
