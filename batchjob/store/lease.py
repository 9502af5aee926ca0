"""The lease of a shard, which keeps two processes from computing the same rows twice. No row depends on it.

`leases/SHARD-of-NUMBER.json` names the attempt that works on a shard. A second process that finds a living holder is
refused; the lease of a dead one is taken over. Where nothing tells whether the holder lives, its counter is watched
while the model loads. A process whose lease was taken over stops before its next commit.
"""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from batchjob.errors import OutputBusyError, StorageError
from batchjob.store import liveness
from batchjob.store.attempts import AttemptFile, read_attempt
from batchjob.store.context import StoreContext
from batchjob.store.disk_errors import storage_errors
from batchjob.store.liveness import Watch, is_over

_NAME = re.compile(r"(\d+)-of-(\d+)\.json")
_LOOKS_PER_BEAT = 30
_PATIENCE = 5.0  # seconds


class Lease:
    """`acquire` before the model is loaded, `settle` after that, `check` before each commit, `close` at the end.

    A thread moves this attempt's counter as long as the lease is open, and calls `on_lost` when another has taken over.
    """

    def __init__(self, context: StoreContext, attempt_file: AttemptFile, shard: tuple[int, int]) -> None:
        """`shard` is the number of this shard and the number of shards."""
        self._context = context
        self._attempt_file = attempt_file
        self._fs, self._layout = context.fs, context.layout
        self._shard = shard
        self._path = self._layout.leases / "{}-of-{}.json".format(*shard)
        self._watches: list[Watch] = []
        self._judged: set[str] = set()  # holders that are over, or were when watched
        self._held = False
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._on_lost: Callable[[], None] = lambda: None

    def acquire(self, on_lost: Callable[[], None] = lambda: None) -> None:
        """Takes the lease, or begins to watch its holders. Raises OutputBusyError if one is known to live."""
        self._on_lost = on_lost
        self._judge_holders()
        if not self._watches:
            self._take_lease()
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)
        self._thread.start()

    def settle(self, give_up: Callable[[], bool] = lambda: False) -> None:
        """Waits until it is clear whether the watched holders live. Raises OutputBusyError if one does.

        Returns without the lease when `give_up` says so.
        """
        while not self._held and not give_up():
            for watch in self._watches:
                lives = watch.verdict()
                if lives:
                    raise self._busy_error(watch.attempt, self._attempt_record(watch.attempt))
                if lives is None:
                    time.sleep(liveness.BEAT_SECONDS / _LOOKS_PER_BEAT)
                    break
            else:
                self._watches = []
                self._judge_holders()  # another process may have been faster
                if not self._watches:
                    self._take_lease()
        self.check()

    def check(self) -> None:
        """Raises OutputBusyError if another process has taken over, StorageError if the output was moved away."""
        if self._held and not self._is_ours():
            self._context.check_place()
            raise OutputBusyError(
                f"another process has taken over {self._shard_name()}, because this one looked dead to it. Finished "
                "rows are kept."
            )

    def close(self) -> None:
        """Gives the lease back and stops the counter. Never fails: the next process sees that this one is over."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(_PATIENCE)  # it may hang in a file system
        try:
            if self._held and self._is_ours():
                self._fs.unlink_if_there(self._path)
        except OSError:
            pass
        self._held = False

    # -- the file

    def _judge_holders(self) -> None:
        """Judges the holders of overlapping leases, each once; one that cannot be judged is watched."""
        with storage_errors("reading", self._layout.leases):
            self._fs.ensure_dir(self._layout.leases)
            for _, holder in self._overlapping():
                if holder in self._judged:
                    continue
                self._judged.add(holder)
                record = self._attempt_record(holder)
                over = is_over(record, self._attempt_file.info)
                if over is None:
                    self._watches.append(Watch(self._context, holder))
                elif not over:
                    raise self._busy_error(holder, record)

    def _attempt_record(self, attempt: str) -> Mapping[str, Any] | None:
        return read_attempt(self._fs, self._layout.attempt(attempt))

    def _overlapping(self) -> list[tuple[Path, str]]:
        """Leases of shards that have chunks in common with ours, and their holders."""
        found = []
        for name in sorted(self._fs.listdir(self._layout.leases)):
            match = _NAME.fullmatch(name)
            if match and overlap(self._shard, (int(match[1]), int(match[2]))):
                holder = self._holder(self._layout.leases / name)
                if holder is not None:
                    found.append((self._layout.leases / name, holder))
        return found

    def _holder(self, path: Path) -> str | None:
        try:
            lease = json.loads(self._fs.read_file(path))
        except (FileNotFoundError, ValueError):
            return None
        job_id = self._context.manifest.job_id
        ours = isinstance(lease, dict) and lease.get("job", job_id) == job_id
        attempt = lease.get("attempt") if ours else None
        return attempt if isinstance(attempt, str) and "/" not in attempt else None

    def _take_lease(self) -> None:
        tmp = self._layout.tmp / f"lease.{self._context.attempt}"
        with storage_errors("writing", self._path):
            for path, _ in self._overlapping():
                if path != self._path:
                    self._fs.unlink_if_there(path)
            lease = {"attempt": self._context.attempt, "job": self._context.manifest.job_id}
            data = json.dumps(lease).encode() + b"\n"
            self._fs.replace_file(self._path, data, via=tmp)
        self._held = True

    def _is_ours(self) -> bool:
        try:
            return self._holder(self._path) == self._context.attempt
        except OSError:
            return True  # cannot be read now: nothing that should stop work

    # -- the counter

    def _beat(self) -> None:
        beats = 0
        while not self._closed.wait(liveness.BEAT_SECONDS):
            beats += 1
            try:
                self._attempt_file.note({"beats": beats})
            except StorageError:
                pass  # the store itself says when the disk does not work
            if self._held and not self._is_ours():
                self._on_lost()

    # -- messages

    def _shard_name(self) -> str:
        shard, number = self._shard
        output = self._layout.root
        return f"shard {shard} of {number} of {output}" if number > 1 else str(output)

    def _busy_error(self, holder: str, record: Mapping[str, Any] | None) -> OutputBusyError:
        record = record or {}
        who = f"process {record.get('pid', '?')} on {record.get('host', '?')} (attempt {holder})"
        return OutputBusyError(
            f"{who} works on {self._shard_name()}, or on part of it. Wait for it, or stop it and run the same command "
            "again; --no-lease runs beside it, which computes rows twice but writes them once."
        )


class NoLease:
    """A lease that is never refused and never lost."""

    def acquire(self, on_lost: Callable[[], None] = lambda: None) -> None:
        return

    def settle(self, give_up: Callable[[], bool] = lambda: False) -> None:
        return

    def check(self) -> None:
        return

    def close(self) -> None:
        return


def overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """True if two shards, each (number, number of shards), have chunks in common: a chunk's shard is its index modulo
    the number of shards."""
    return (one[0] - other[0]) % math.gcd(one[1], other[1]) == 0
