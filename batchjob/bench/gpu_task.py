"""One part of `gpu_check`, in a process of its own: what it is told, and how it reports.

After an illegal memory access a process can do nothing more with its GPU, and a hang must end only its own part. What
a part reports is on disk at once, so that what it found before a crash is kept.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchjob.bench.limits import Limits

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Task:
    function: str  # "module:name" inside batchjob.bench; called with a task and a report
    deadline: float  # of the monotonic clock, which all processes share; it is stopped then
    result_path: str
    log_path: str  # what it prints
    device: str = "cuda"
    tiny: bool = False
    limits: Limits | None = None
    settings: dict[str, Any] = field(default_factory=dict)  # of the engine, beside the defaults
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def torch_device(self) -> torch.device:
        import torch

        return torch.device("cuda:0" if self.device == "cuda" else self.device)

    @property
    def dtype_name(self) -> str:
        """bfloat16, but for rehearsals: their host has no fast products in it."""
        return "float32" if self.tiny else "bfloat16"


class Report:
    """The results of a part so far, kept on disk."""

    def __init__(self, path: str | Path, deadline: float) -> None:
        self.values: dict[str, Any] = {}
        self._path = Path(path)
        self.deadline = deadline

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    def add(self, **values: Any) -> None:
        self.values.update(values)
        self.write()

    def attempt(self, name: str, function: Callable[[], Any]) -> None:
        """Adds what the function returns, or why it failed: what follows may still work."""
        try:
            value = function()
        except Exception as error:
            self.values.setdefault("errors", {})[name] = describe(error)
            print(f"{name} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            self.write()
        else:
            self.add(**{name: value})

    def write(self) -> None:
        write_json(self._path, self.values)


def describe(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:500]}" if lines else type(error).__name__


def write_json(path: Path, value: Any) -> None:
    """Writes the file whole or not at all."""
    other = path.with_name(path.name + ".new")
    other.write_text(json.dumps(value, indent=1))
    other.replace(path)


def run_task(task: Task) -> None:
    """The whole life of a part's process. Ends it without the clean-up of libraries, which can hang."""
    os.setsid()  # so that processes that it starts end with it
    log = os.open(task.log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    report = Report(task.result_path, task.deadline)
    code = 0
    try:
        if task.tiny:
            import torch

            torch.set_num_threads(1)
        module, _, name = task.function.partition(":")
        getattr(import_module(f"batchjob.bench.{module}"), name)(task, report)
        report.add(over=True)
    except BaseException as error:  # whatever it is, it belongs in the report
        traceback.print_exc()
        report.add(error=describe(error), traceback=traceback.format_exc())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def environment(**more: str) -> dict[str, str]:
    """The environment of a new Python process that finds this project, installed or not."""
    path = os.pathsep.join(filter(None, (str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", **more}
