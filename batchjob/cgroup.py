"""The control groups that limit this process's memory: of a SLURM job or a container. Standard library only."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


class MemoryGroup(NamedTuple):
    """This process's group in a hierarchy that counts memory. `root` is the hierarchy's; version 1 and version 2 have
    files of different names."""

    directory: Path
    root: Path
    version: int


def memory_groups(proc: Path = PROC, cgroups: Path = CGROUPS) -> list[MemoryGroup]:
    """Returns none where the kernel shows none."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    groups = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2 has one hierarchy, without a list of controllers
            groups.append(MemoryGroup(cgroups / path.lstrip("/"), cgroups, 2))
        elif "memory" in controllers.split(","):
            root = cgroups / "memory"
            groups.append(MemoryGroup(root / path.lstrip("/"), root, 1))
    return groups
