"""The engine: continuous batching over a `Runner`. Importing this package imports no torch (`factory` does, lazily)."""

from batchjob.engine.config import Capacity, Detokenizer, EngineConfig, Handle, Runner

__all__ = ["Capacity", "Detokenizer", "EngineConfig", "Handle", "Runner"]
