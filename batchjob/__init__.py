"""Runs a dataset of prompts through a language model, offline, and loses no row.

    import batchjob

    batchjob.run(batchjob.JobSpec(model="...", input=("rows.jsonl",), output="out"))

Importing this package is fast and loads neither torch nor pyarrow: `run` does that when it needs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchjob.errors import (
    BatchJobError,
    ConfigMismatchError,
    DiskFullError,
    EngineError,
    FeederError,
    FileServerError,
    InputDataError,
    InputMissingError,
    OutputBusyError,
    OutputCreateError,
    StoppedEarlyError,
    StorageError,
    UnsupportedModelError,
    UsageError,
)
from batchjob.spec import JobSpec, SamplingParams

if TYPE_CHECKING:
    from batchjob.job.run import run

__version__ = "0.1.0"

__all__ = [
    "BatchJobError",
    "ConfigMismatchError",
    "DiskFullError",
    "EngineError",
    "FeederError",
    "FileServerError",
    "InputDataError",
    "InputMissingError",
    "JobSpec",
    "OutputBusyError",
    "OutputCreateError",
    "SamplingParams",
    "StoppedEarlyError",
    "StorageError",
    "UnsupportedModelError",
    "UsageError",
    "__version__",
    "run",
]


def __getattr__(name: str) -> Any:
    if name == "run":
        from batchjob.job.run import run

        return run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
