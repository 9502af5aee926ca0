"""A job of a thousand rows on the fake engine, run by the real program with faulty workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

Write = Callable[[Path, Iterable[Any]], Path]


@dataclass
class Running:
    """The program as it runs. `lines` are what it printed so far, each with the time of its arrival."""

    process: subprocess.Popen[str]
    output: Path
    lines: list[tuple[float, str]] = field(default_factory=list)
    pids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append((time.monotonic(), line.rstrip("\n")))

    @property
    def text(self) -> str:
        return "\n".join(line for _, line in self.lines)

    def wait(self, timeout: float = 60) -> int:
        code = self.process.wait(timeout)
        self._reader.join(10)
        return code

    def wait_for(self, condition: Callable[[], Any], timeout: float = 30) -> Any:
        deadline = time.monotonic() + timeout
        while not (found := condition()):
            assert self.process.poll() is None, self.text
            assert time.monotonic() < deadline, self.text
            time.sleep(0.02)
        return found

    def wait_for_line(self, start: str) -> float:
        """When a line that starts like this came."""
        return self.wait_for(lambda: next((at for at, line in self.lines if line.startswith(start)), 0.0))

    def wait_for_rows(self) -> None:
        self.wait_for(lambda: finished_rows(self.output))

    def children(self) -> list[int]:
        """The worker and what it started."""
        found, parents = [], [self.process.pid]
        while parents:
            pid = parents.pop()
            with suppress(OSError):
                children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
                found += list(map(int, children))
                parents += list(map(int, children))
        return found

    @property
    def restarts(self) -> list[str]:
        return [line for _, line in self.lines if line.startswith("restart ")]


def finished_rows(output: Path) -> set[int]:
    """Rows in the parts and logs as they lie there."""
    found: set[int] = set()
    for path in (output / ".batchjob" / "wal").glob("*/*.log"):
        with suppress(FileNotFoundError):
            found.update(json.loads(line[9:])["row"] for line in path.read_bytes().split(b"\n")[:-1])
    if (output / "data").is_dir():
        for path in (output / "data").iterdir():
            found.update(pyarrow.parquet.read_table(path, columns=["row_index"]).column(0).to_pylist())
    return found


def attempts(output: Path) -> list[dict[str, Any]]:
    """Their records, oldest first."""
    records = [json.loads(path.read_text()) for path in (output / ".batchjob" / "attempts").glob("*.json")]
    return sorted(records, key=lambda record: record["restarts"])


def rows_of(output: Path) -> list[dict[str, Any]]:
    return [row for path in sorted((output / "data").iterdir()) for row in pyarrow.parquet.read_table(path).to_pylist()]


def is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


class Kit:
    rows_of = staticmethod(rows_of)
    attempts = staticmethod(attempts)
    finished_rows = staticmethod(finished_rows)
    is_gone = staticmethod(is_gone)

    @staticmethod
    def once(marker: Path) -> str:
        """A patch for `faulty_program`: only the first worker has the faults."""
        return f"""
import os
if os.path.exists({str(marker)!r}): faults.clear()
else: open({str(marker)!r}, "w").close()
"""

    @staticmethod
    def poison() -> int:
        """The token of the word "poison"."""
        from batchjob.prompts.fake_tokenizer import FakeTokenizer

        (token,) = FakeTokenizer().encode("poison", add_special_tokens=False)
        return token


@pytest.fixture(scope="session")
def kit() -> Kit:
    return Kit()


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def source(tmp_path: Path, write_jsonl: Write) -> Path:
    return write_jsonl(tmp_path / "in.jsonl", [{"prompt": f"row number {i}"} for i in range(1000)])


@pytest.fixture
def start(source: Path, output: Path, faulty_program: Callable[..., list[str]]) -> Iterable[Callable[..., Running]]:
    """`start("--max-num-seqs", "8", patch="...", step_seconds=0.1)`: flags, a patch for the workers, and faults."""
    started: list[Running] = []

    def start(*flags: str, patch: str = "", source: Path = source, **faults: Any) -> Running:
        command = [*faulty_program(patch=patch, **faults), "run", "--engine", "fake", "--input", str(source)]
        process = subprocess.Popen(
            [*command, "--output", str(output), "--chunk-rows", "100", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(Running(process, output))
        return started[-1]

    yield start
    for running in started:
        if running.process.poll() is None:
            for pid in running.children():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            running.process.kill()
        running.wait()
