"""`WorkerState`: one worker as its messages tell of it: its phase, the rows in its engine, its tokens."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from batchjob.job.observer import START
from batchjob.supervisor.protocol import Kind


class Listener:
    """Gets the messages that restarts do not need, but a person does."""

    def entered(self, phase: str) -> None: ...

    def said(self, phase: str, line: str) -> None: ...

    def header(self, lines: list[str]) -> None: ...

    def share(self, num_rows: int, num_done: int) -> None: ...

    def opened(self, index: int, row_index: int, num_rows: int, num_complete: int) -> None: ...

    def finished(self, rows: list[int]) -> None: ...

    def ended_with(self, message: dict[str, Any]) -> None: ...


class WorkerState:
    """Fed with the worker's bytes as they come; a last line that a kill cut off is left out.

    `suspects` are the rows whose end is noted one by one. Others are only counted, so memory is bounded by what runs.
    """

    def __init__(self, suspects: Collection[int] = (), listener: Listener | None = None) -> None:
        self._listener = listener or Listener()
        self._suspects = frozenset(suspects)
        self._tail = b""
        self.phase = START
        self.attempt: str | None = None
        self.directory: Path | None = None
        self.in_flight: dict[int, None] = {}  # rows in the engine, in the order of their admission
        self.newest: tuple[int, ...] = ()  # those that entered with the last step that took any
        self.cleared: set[int] = set()  # suspects that are finished
        self.num_finished = 0  # rows in the store
        self.has_computed = False  # at least one step ended
        self.prompt_tokens = self.output_tokens = 0
        self.num_failed = self.num_running = self.num_waiting = 0
        self.end: tuple[Kind, int, str] | None = None

    def feed(self, data: bytes) -> None:
        *lines, self._tail = (self._tail + data).split(b"\n")
        for line in lines:
            self._take(line.decode())

    def _take(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word == "+":
            self.has_computed = self.has_computed or bool(self.newest)
            self.newest = tuple(map(int, rest.split()))
            self.in_flight.update(dict.fromkeys(self.newest))
        elif word == "-":
            rows = list(map(int, rest.split()))
            self.num_finished += len(rows)
            for row in rows:
                self.in_flight.pop(row, None)
            self.cleared.update(self._suspects.intersection(rows))
            self._listener.finished(rows)
        elif word == ".":
            self.has_computed = self.has_computed or bool(self.newest)
            self.prompt_tokens, self.output_tokens, *more = map(int, rest.split())
            if more:
                self.num_failed, self.num_running, self.num_waiting = more
        elif word == "phase":
            self.phase = rest
            self._listener.entered(rest)
        elif word == "attempt":
            self.attempt, directory = json.loads(rest)
            self.directory = Path(directory)
        elif word == "end":
            kind, code, message = json.loads(rest)
            self.end = Kind(kind), code, message
        else:
            self._tell(word, rest)

    def _tell(self, word: str, rest: str) -> None:
        listener = self._listener
        if word == "say":
            listener.said(self.phase, json.loads(rest))
        elif word == "header":
            listener.header(json.loads(rest))
        elif word == "share":
            listener.share(*map(int, rest.split()))
        elif word == "chunk":
            listener.opened(*map(int, rest.split()))
        elif word == "result":
            listener.ended_with(json.loads(rest))
