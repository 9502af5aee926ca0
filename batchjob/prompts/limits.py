"""Bounds on the work of a chat template, which is a program from the model's author and reads text from anyone.

Jinja's sandbox keeps a template away from Python, not from running for ever or writing ten gigabytes.
"""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from batchjob.prompts.tokenizer import RenderTimeout

RENDER_SECONDS = 5.0  # for one row
RENDER_CHARS = 128 << 20  # of one rendered row
RENDER_MEMORY = 2 << 30  # bytes of address space beyond what the process has


class Timer:
    """Raises RenderTimeout in the main thread when a `with` block takes longer than `seconds`. Elsewhere it cannot."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._active = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Holds the signal handler for many `with` blocks."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGALRM, self._expired)
        self._active = True
        try:
            yield
        finally:
            self._active = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def _expired(self, signum: int, frame: FrameType | None) -> NoReturn:
        raise RenderTimeout

    def __enter__(self) -> None:
        if self._active:
            signal.setitimer(signal.ITIMER_REAL, self._seconds)

    def __exit__(self, *_: object) -> None:
        if self._active:
            signal.setitimer(signal.ITIMER_REAL, 0)


@contextmanager
def memory_limit(extra: int) -> Iterator[None]:
    """Raises MemoryError in a block that takes more than `extra` bytes on top of the present address space."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm", "rb") as file:
        pages = int(file.read().split()[0])
    wanted = pages * resource.getpagesize() + extra
    if soft != resource.RLIM_INFINITY:
        wanted = min(wanted, soft)
    resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
