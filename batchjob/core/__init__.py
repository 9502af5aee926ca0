"""Scheduling and KV-block bookkeeping on plain Python data: standard library only, no clock, no randomness.

Glossary of the short names used here: KV = the keys and values of attention, kept per token position; slot = the
index below `max_num_seqs` that a running sequence keeps, for buffers with one row per sequence.
"""

from batchjob.core.blocks import BlockPool
from batchjob.core.order import ORDERS, arrange
from batchjob.core.scheduler import Scheduler
from batchjob.core.sequence import Sequence, SequenceState
from batchjob.core.step_plan import Slice, StepPlan

__all__ = ["ORDERS", "BlockPool", "Scheduler", "Sequence", "SequenceState", "Slice", "StepPlan", "arrange"]
