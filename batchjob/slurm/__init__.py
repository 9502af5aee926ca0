"""SLURM inside a running task: its identity, its time limit, and its requeue.

Nothing here is needed for correctness. The output directory alone decides what is done; a task that SLURM kills without
warning is resumed like any other process.
"""

from __future__ import annotations

from batchjob.slurm.requeue import Requeue, after_stop
from batchjob.slurm.task import SlurmTask

__all__ = ["Requeue", "SlurmTask", "after_stop"]
