"""Kills by the kernel's out-of-memory killer. Its counters only grow, so a kill between two readings shows."""

from __future__ import annotations

from pathlib import Path

from batchjob.cgroup import CGROUPS, PROC, memory_groups

_EVENT_FILES = {1: "memory.oom_control", 2: "memory.events"}


def num_memory_kills(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Returns the kills so far, in the whole machine and in this process's control groups together; 0 where neither can
    be seen. Only the difference of two readings has a meaning."""
    files = [proc / "vmstat", cgroups / "memory.events"]  # the second is of the root of a container
    files += [group.directory / _EVENT_FILES[group.version] for group in memory_groups(proc, cgroups)]
    return sum(_field(path, "oom_kill") for path in files)


def _field(path: Path, name: str) -> int:
    try:
        return next(int(line.split()[1]) for line in path.read_text().splitlines() if line.split()[:1] == [name])
    except (OSError, ValueError, IndexError, StopIteration):
        return 0
