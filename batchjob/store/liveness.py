"""The judgement whether another attempt still works. It saves work only: no row depends on the answer.

On the same host and boot, process id and start time tell. An attempt of the same SLURM task that has been restarted
since is over, even if its process still runs somewhere. Of any other, only the counter in its record tells, which a
living process keeps moving: it is watched, never compared with a clock.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from batchjob.store.attempts import is_alive, read_attempt
from batchjob.store.context import StoreContext

BEAT_SECONDS = 30.0  # between two movements of a counter
_BEATS_WATCHED = 2


def is_over(record: Mapping[str, Any] | None, own: Mapping[str, Any]) -> bool | None:
    """True if the attempt with this record has ended, as the attempt with the record `own` sees it. None: watch it."""
    if record is None:
        return None
    if record.get("ended"):
        return True
    alive = is_alive(record)
    if alive is not None:
        return not alive
    theirs, ours = record.get("slurm"), own.get("slurm")
    if isinstance(theirs, dict) and isinstance(ours, dict) and theirs.get("task") == ours.get("task") is not None:
        before, now = theirs.get("restart"), ours.get("restart")
        if type(before) is int and type(now) is int and before < now:
            return True
    return None


class Watch:
    """Looks at the counter of an attempt until it moves, or has stood still for two of its beats."""

    def __init__(self, context: StoreContext, attempt: str) -> None:
        self.attempt = attempt
        self._context = context
        self._first = self._read().get("beats")
        self._until = time.monotonic() + _BEATS_WATCHED * BEAT_SECONDS

    def verdict(self) -> bool | None:
        """True if it lives, False if its counter stood still, None if it was not watched for long enough."""
        record = self._read()
        if record.get("ended"):
            return False
        if record.get("beats") != self._first:
            return True
        return None if time.monotonic() < self._until else False

    def _read(self) -> Mapping[str, Any]:
        return read_attempt(self._context.fs, self._context.layout.attempt(self.attempt)) or {}
