"""The kernel's counters of kills for want of memory."""

from __future__ import annotations

from pathlib import Path

from batchjob.supervisor.oom import num_memory_kills


def test_kills_by_the_kernel_are_counted_wherever_they_show(tmp_path: Path) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    assert num_memory_kills(proc, cgroups) == 0
    (proc / "vmstat").write_text("nr_free_pages 7\noom_kill 2\n")
    assert num_memory_kills(proc, cgroups) == 2
    (proc / "self" / "cgroup").write_text("4:cpu,memory:/job\n0::/job.scope\n")
    files = {"memory/job/memory.oom_control": "under_oom 0\noom_kill 1\n", "job.scope/memory.events": "oom_kill 3\n"}
    for path, text in files.items():
        (cgroups / path).parent.mkdir(parents=True)
        (cgroups / path).write_text(text)
    assert num_memory_kills(proc, cgroups) == 6
