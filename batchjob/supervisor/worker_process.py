"""`WorkerProcess`: how a worker is started, read from, told to stop, and asked for its stacks before it is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping

from batchjob import child_process
from batchjob.job.observer import RestartHints, Team
from batchjob.spec import JobSpec
from batchjob.supervisor.protocol import Lost, Orders, StopOrder

WORKER = (sys.executable, "-m", "batchjob.supervisor.worker")  # tests put a program of their own here
STACKS_SIGNAL = signal.SIGQUIT  # the worker answers it with the stacks of all its threads
_STACKS_WAIT = 2.0  # seconds for that answer
_STACKS_LOOK = 0.1  # seconds in which it must not have grown to be complete
_MAX_STACKS = 1 << 20  # bytes of it that are kept


class WorkerProcess:
    """Standard output and error are the supervisor's own, for tracebacks and for what libraries print."""

    def __init__(
        self,
        spec: JobSpec,
        hints: RestartHints,
        team: Team,
        *,
        debug: bool,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """`environ` are variables on top of those of this process."""
        self._report_fd, report_end = os.pipe()
        os.set_blocking(self._report_fd, False)
        # In memory: there may be no place for temporary files, and no disk is to be waited for when a process hangs.
        self._stacks = os.fdopen(os.memfd_create("batchjob-stacks"), "w+b")
        try:
            self._process = child_process.spawn(WORKER, pass_fds=(report_end, self._stacks.fileno()), environ=environ)
        finally:
            os.close(report_end)
        self._stacks_asked = self._stacks_seen = 0.0
        self._stacks_size = 0
        self.tell(Orders(spec, hints, team, os.getpid(), report_end, self._stacks.fileno(), debug))

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        """Returns a descriptor that is readable when there is a message, or when the worker is gone."""
        return self._report_fd

    def read(self) -> bytes | None:
        """Returns the bytes written since the last call; None once it is gone and everything is read."""
        data = b""
        while True:
            try:
                block = os.read(self._report_fd, 1 << 16)
            except BlockingIOError:
                return data
            if not block:
                return data or None
            data += block

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float) -> int | None:
        """Returns its return code (minus the signal that killed it), or None if it is still there."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def ask_for_stacks(self) -> None:
        self._process.send_signal(STACKS_SIGNAL)
        self._stacks_asked = self._stacks_seen = time.monotonic()

    def has_answered(self) -> bool:
        """Returns True once its stacks are written, or it is clear that they will not be."""
        now = time.monotonic()
        if now < self._stacks_seen + _STACKS_LOOK:
            return False
        before, self._stacks_size = self._stacks_size, os.fstat(self._stacks.fileno()).st_size
        self._stacks_seen = now
        return self._stacks_size == before > 0 or now >= self._stacks_asked + _STACKS_WAIT

    def stacks(self) -> str:
        """Returns the stacks that it wrote when asked, or when it crashed."""
        self._stacks.seek(0)
        return self._stacks.read(_MAX_STACKS).decode(errors="replace").strip()

    def close(self) -> None:
        """Ends it, if it has not ended, and closes its pipes."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        os.close(self._report_fd)
        self._stacks.close()

    def tell(self, message: Orders | StopOrder | Lost) -> None:
        child_process.send(self._process.stdin, message)  # if it is gone, `wait` says so
