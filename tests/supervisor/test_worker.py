"""Errors of a worker after which another attempt may do better, and a time limit that goes on counting."""

from __future__ import annotations

import pytest

from batchjob.errors import EngineError, InputMissingError, StorageError, UnsupportedModelError
from batchjob.job.devices import Device
from batchjob.job.observer import LOAD, RUN, Team
from batchjob.spec import JobSpec
from batchjob.supervisor.protocol import Kind
from batchjob.supervisor.replica import Replica
from batchjob.supervisor.reporter import Reporter
from batchjob.supervisor.worker import classify


class OutOfMemoryError(RuntimeError):
    """As torch's."""


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "in_load", "in_run"),
    [
        (EngineError("step 3 failed"), Kind.EXIT, Kind.CRASH),
        (UnsupportedModelError("a window that no backend has"), Kind.EXIT, Kind.EXIT),
        (InputMissingError("gone"), Kind.EXIT, Kind.EXIT),
        (StorageError("writing failed: cannot allocate memory"), Kind.EXIT, Kind.EXIT),
        (ValueError("a bug"), Kind.EXIT, Kind.EXIT),
        (MemoryError(), Kind.MEMORY, Kind.MEMORY),
        (caused(EngineError("step 3 failed"), OutOfMemoryError("tried to allocate 2 GiB")), Kind.MEMORY, Kind.MEMORY),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes"), Kind.MEMORY, Kind.MEMORY),
        (
            caused(EngineError("step 3 failed"), RuntimeError("CUDA error: unspecified launch failure")),
            *[Kind.DEVICE] * 2,
        ),
    ],
    ids=str,
)
def test_what_may_be_better_next_time(error: Exception, in_load: Kind, in_run: Kind) -> None:
    assert (classify(error, LOAD), classify(error, RUN)) == (in_load, in_run)


def test_a_time_limit_counts_from_the_first_start(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("batchjob.supervisor.replica.time.monotonic", lambda: now)

    def replica_of(limit: str) -> Replica:
        spec = JobSpec(time_limit=limit)
        return Replica(Device("cpu", "cpu"), Team("a", 0, 1, spec), Reporter(spec, ["cpu"], print), debug=False)

    replica, *unlimited = map(replica_of, ("1h", "auto", "none"))
    assert replica.worker_spec().time_limit == "1h"
    now += 600
    assert replica.worker_spec().time_limit == "3000s", "it waited for others to make the job"
    replica.num_restarts = 1
    now += 600
    assert replica.worker_spec().time_limit == "2400s"
    assert [one.worker_spec().time_limit for one in unlimited] == ["auto", "none"]
