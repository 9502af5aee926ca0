"""SLURM: what a task knows of itself, putting itself back in the queue, and the scripts that start it.

Nothing here is needed for correctness. The output directory alone decides what is done; a task that SLURM kills without
a word is resumed like any other process.
"""

from __future__ import annotations

from batchjob.slurm.requeue import Requeue, after_stop
from batchjob.slurm.task import SlurmTask

__all__ = ["Requeue", "SlurmTask", "after_stop"]
