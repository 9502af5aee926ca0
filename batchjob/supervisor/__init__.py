"""The thin parent of a run: owns signals, the watchdog and restarts, never data. Loads neither torch nor pyarrow."""

from __future__ import annotations

from batchjob.supervisor.supervisor import supervise

__all__ = ["supervise"]
