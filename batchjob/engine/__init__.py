"""The engine: continuous batching over a `Runner`. Importing this package imports no torch (`create_engine` does)."""

from batchjob.engine.config import Capacity, EngineConfig, Handle, Runner, StepOutput
from batchjob.engine.engine import Engine, EngineStats
from batchjob.engine.factory import create_engine
from batchjob.engine.fake import FakeRunner, fake_capacity

__all__ = [
    "Capacity",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "FakeRunner",
    "Handle",
    "Runner",
    "StepOutput",
    "create_engine",
    "fake_capacity",
]
