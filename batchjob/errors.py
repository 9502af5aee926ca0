"""The errors a user can meet, drawn as one tree, and the exit code of each.

    BatchJobError                 1   anything below, or a bug
    ├── UsageError                2   flags or job file that make no sense
    ├── InputDataError           65   input bad beyond limits, or too many failed rows
    ├── InputMissingError        66   input missing, or changed since the plan was made
    ├── OutputBusyError          69   another live process works on the same shard
    ├── EngineError              70   the engine cannot run
    │   ├── UnsupportedModelError 70  the model needs something the engine does not do
    │   └── FeederError          70   the process that reads and tokenises the input does not stay up
    ├── OutputCreateError        73   the output directory cannot be made or lacks an operation we need
    ├── StorageError             74   reading or writing failed: disk full, I/O error
    │   ├── DiskFullError        74   no room left, or the quota is used up
    │   └── FileServerError      75   the file server lost track of our files; everything is safe, run it again
    ├── StoppedEarlyError        75   stopped by a signal or a limit; everything is safe, run it again
    └── ConfigMismatchError      78   the job differs from the one that the output directory holds

A failed *row* is data (`records.RowError`), never an exception.
"""

from __future__ import annotations

from typing import ClassVar


class BatchJobError(Exception):
    """Base of every error that the command line reports in one line. The message says what to do."""

    exit_code: ClassVar[int] = 1


class UsageError(BatchJobError):
    exit_code = 2


class InputDataError(BatchJobError):
    exit_code = 65


class InputMissingError(BatchJobError):
    exit_code = 66


class OutputBusyError(BatchJobError):
    exit_code = 69


class EngineError(BatchJobError):
    exit_code = 70


class UnsupportedModelError(EngineError):
    pass


class FeederError(EngineError):
    pass


class OutputCreateError(BatchJobError):
    exit_code = 73


class StorageError(BatchJobError):
    exit_code = 74


class DiskFullError(StorageError):
    pass


class FileServerError(StorageError):
    exit_code = 75


class StoppedEarlyError(BatchJobError):
    exit_code = 75


class ConfigMismatchError(BatchJobError):
    exit_code = 78
