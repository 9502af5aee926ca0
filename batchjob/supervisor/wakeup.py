"""`Wakeup`: a wait for workers and for signals at once."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Iterable
from types import TracebackType


class Wakeup:
    """While this context lasts, a signal that has a handler ends `wait`. The handler itself need only set a flag."""

    def __enter__(self) -> Wakeup:
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        os.set_blocking(self._write_fd, False)
        self._is_set = threading.current_thread() is threading.main_thread()
        if self._is_set:
            self._old = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_set:
            signal.set_wakeup_fd(self._old)
        os.close(self._read_fd)
        os.close(self._write_fd)

    def wait(self, fds: Iterable[int], seconds: float) -> None:
        """Waits until there is something to read from one of `fds`, a signal comes, or the time is over."""
        ready, _, _ = select.select([*fds, self._read_fd], [], [], max(0.0, seconds))
        if self._read_fd in ready:
            with contextlib.suppress(BlockingIOError):
                while os.read(self._read_fd, 512):
                    pass
