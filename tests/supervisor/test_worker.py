"""Which errors of a worker another attempt may do better with, and how a time limit goes on counting."""

from __future__ import annotations

import pytest

from batchjob.errors import EngineError, InputMissingError, StorageError, UnsupportedModelError
from batchjob.job.devices import Device
from batchjob.job.observer import LOAD, RUN
from batchjob.spec import JobSpec
from batchjob.supervisor.protocol import Kind
from batchjob.supervisor.replica import Lane
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
    lane, *unlimited = [
        Lane(JobSpec(time_limit=limit), Device("cpu", "cpu"), print, debug=False) for limit in ("1h", "auto", "none")
    ]
    assert lane.worker_spec().time_limit == "1h"
    now += 600
    assert lane.worker_spec().time_limit == "3000s", "it waited for others to make the job"
    lane.num_restarts = 1
    now += 600
    assert lane.worker_spec().time_limit == "2400s"
    assert [lane.worker_spec().time_limit for lane in unlimited] == ["auto", "none"]
