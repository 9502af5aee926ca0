"""Whether the kernel killed somebody because memory ran out: its counters only grow, so a kill in between shows."""

from __future__ import annotations

from pathlib import Path


def num_memory_kills(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Kills of the out-of-memory killer so far, in the whole machine and in our control group together; 0 where neither
    can be seen. Good for comparing with later only."""
    return sum(_field(path, "oom_kill") for path in [proc / "vmstat", *_event_files(proc, cgroups)])


def _event_files(proc: Path, cgroups: Path) -> list[Path]:
    """Of version 2 the events of our group, of version 1 the state of its memory controller."""
    files = [cgroups / "memory.events"]  # the root of a container
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return files
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            files.append(cgroups / path.lstrip("/") / "memory.events")
        elif "memory" in controllers.split(","):
            files.append(cgroups / "memory" / path.lstrip("/") / "memory.oom_control")
    return files


def _field(path: Path, name: str) -> int:
    try:
        return next(int(line.split()[1]) for line in path.read_text().splitlines() if line.split()[:1] == [name])
    except (OSError, ValueError, IndexError, StopIteration):
        return 0
