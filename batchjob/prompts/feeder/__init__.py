"""Rows to prompts beside the engine: a process without torch that reads, renders and tokenises."""

from __future__ import annotations

from batchjob.prompts.feeder.batches import FedBatch, FeederConfig, PromptFeeder, in_batches
from batchjob.prompts.feeder.process import Feeder

__all__ = ["FedBatch", "Feeder", "FeederConfig", "PromptFeeder", "in_batches"]
