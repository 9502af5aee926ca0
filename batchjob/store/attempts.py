"""Attempts: one file per start of one process, which identifies the owner of logs and temporary files.

Only an attempt that is known to be dead loses its temporary files: one of this boot of this machine, in this process
namespace, whose process is gone or started at another time than noted. No clock decides anything.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from batchjob.store.disk_errors import storage_errors
from batchjob.store.fsops import FsOps
from batchjob.store.paths import Layout


def new_attempt_id() -> str:
    """A unique id, which sorts by start time where clocks agree; nothing depends on that order."""
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:40] or "host"
    return f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{host}-{os.getpid()}-{secrets.token_hex(4)}"


def process_identity() -> dict[str, Any]:
    """The values that together tell this process from every other one that has ever run here."""
    return {
        "host": socket.gethostname(),
        "boot_id": _read("/proc/sys/kernel/random/boot_id"),
        "pid_namespace": _readlink("/proc/self/ns/pid"),
        "pid": os.getpid(),
        "pid_start": _pid_start(os.getpid()),
    }


def now_text() -> str:
    """The time in UTC, for a person to read; nothing is decided by it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def attempt_record(info: Mapping[str, Any], started: str | None = None) -> bytes:
    """The content of an attempt's file: identity, start time, and what the job notes about itself."""
    record = {
        **process_identity(),
        "started": started or now_text(),
        **info,
    }
    return json.dumps(record, indent=1, default=str).encode() + b"\n"


class AttemptFile:
    """The file of this attempt in `attempts/`. `info` is what the attempt has noted about itself so far."""

    def __init__(self, fs: FsOps, layout: Layout, attempt: str, job_id: str) -> None:
        self.info: Mapping[str, Any] = {}
        self._fs = fs
        self._path = layout.attempt(attempt)
        self._via = layout.tmp / f"attempt.{attempt}"
        self._job_id = job_id
        self._started = now_text()
        self._lock = threading.Lock()
        self._is_closed = False

    def note(self, info: Mapping[str, Any]) -> None:
        """Adds to what is noted. From any thread. Raises StorageError."""
        with storage_errors("writing", self._path.parent):
            self.write(info)

    def write(self, info: Mapping[str, Any]) -> None:
        """The same as `note`. Raises OSError."""
        with self._lock:
            if self._is_closed:
                return  # a thread that comes late
            self.info = {**self.info, **info}
            record = attempt_record({"job": self._job_id, **self.info}, self._started)
            try:
                self._fs.replace_file(self._path, record, via=self._via)
            except OSError:
                with suppress(OSError):
                    self._fs.unlink_if_there(self._via)  # or no later note could be written
                raise

    def close(self) -> None:
        """Later notes are dropped."""
        with self._lock:
            self._is_closed = True


def read_attempt(fs: FsOps, path: Path) -> dict[str, Any] | None:
    """An attempt's record; None if there is none that can be read."""
    try:
        record = json.loads(fs.read_file(path))
    except (OSError, ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def is_alive(record: Mapping[str, Any] | None) -> bool | None:
    """True if the process of an attempt still runs, None if that cannot be told from here."""
    if record is None:
        return None
    here = process_identity()
    for name in ("host", "boot_id", "pid_namespace"):
        if not record.get(name) or record[name] != here[name]:
            return None
    pid, start = record.get("pid"), record.get("pid_start")
    if type(pid) is not int or not isinstance(start, str) or not start:
        return None
    return _pid_start(pid) == start


def _pid_start(pid: int) -> str:
    """Start time of a process in clock ticks since boot, which no later process of the same number shares."""
    stat = _read(f"/proc/{pid}/stat")
    fields = stat.rpartition(")")[2].split()
    # Field 3 (state) comes first here; 22 is the start time. A zombie has done its last write.
    return "" if len(fields) < 20 or fields[0] in ("Z", "X") else fields[19]


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _readlink(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
