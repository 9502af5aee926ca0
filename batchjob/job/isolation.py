"""Rows that may bring the engine down: suspects run apart from all others, and poisoned rows become errors.

Both are known from earlier attempts of the same supervisor, see `batchjob.job.observer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from batchjob.job.chunk_source import OwnChunks
from batchjob.job.observer import RestartHints
from batchjob.plan import Chunk
from batchjob.records import Prompt, RowError

if TYPE_CHECKING:
    from batchjob.store.chunk import OpenChunk


class Isolation:
    """The suspects and the poisoned rows of one run.

    A poisoned row is held until another row shows that the engine works: if the engine dies of every row, the row is
    not to blame. `open_chunk` opens a chunk, or returns None for one that is complete.
    """

    def __init__(self, hints: RestartHints, chunks: OwnChunks, open_chunk: Callable[[Chunk], OpenChunk | None]) -> None:
        self._suspects = hints.suspects
        self._poisoned = hints.poisoned
        self._chunks = chunks
        self._open_chunk = open_chunk
        self._held: list[tuple[OpenChunk, Prompt]] = []
        self._engine_works = False

    def groups(self) -> Iterator[Sequence[int]]:
        """Yields groups of rows to run one after the other, each with nothing else in the engine. The first is one row
        that is no suspect: if the engine dies of that one too, the rows are not to blame."""
        if not self._suspects:
            return
        control = self._find_control_row({row for group in self._suspects for row in group})
        if control is not None:
            yield (control,)
        yield from self._suspects

    def _find_control_row(self, suspects: set[int]) -> int | None:
        """Returns the last free row of the first chunk that has one: far from its neighbours, and soon read anyway."""
        for chunk in self._chunks.todo:
            rows = set(_rows_of(chunk)) - suspects - self._poisoned.keys()
            if not rows or not self._chunks.claim(chunk):
                continue
            opened = self._open_chunk(chunk)
            if opened is not None and (free := rows - opened.complete_rows()):
                return max(free)
        return None

    def chunks_of(self, group: Sequence[int]) -> Iterator[tuple[Chunk, set[int]]]:
        """Yields the chunks, open now, in which rows of the group are unfinished, each with its rows to skip."""
        self._chunks.adopt(group)
        for chunk in self._chunks.todo:
            rows = _rows_of(chunk)
            if not any(row in rows for row in group) or not self._chunks.claim(chunk):
                continue
            opened = self._open_chunk(chunk)
            if opened is not None and (wanted := set(group).intersection(rows) - opened.complete_rows()):
                yield chunk, set(rows) - wanted

    def take_prompt(self, chunk: OpenChunk, prompt: Prompt) -> Prompt | None:
        """Returns the prompt to run; for a poisoned row its error, or None while the row is held."""
        how = self._poisoned.get(prompt.row_index)
        if how is None or prompt.error is not None:
            return prompt
        error = RowError("engine_crash", f"each time this row ran alone, the process with the engine {how}")
        prompt = replace(prompt, error=error)
        if self._engine_works:
            return prompt
        self._held.append((chunk, prompt))
        return None

    @property
    def holds_rows(self) -> bool:
        return bool(self._held)

    def release_held(self) -> list[tuple[OpenChunk, Prompt]]:
        """Returns the held rows, which are errors now. Later poisoned rows are not held: the engine works."""
        held, self._held, self._engine_works = self._held, [], True
        return held


def _rows_of(chunk: Chunk) -> range:
    return range(chunk.row_index, chunk.row_index + chunk.num_rows)
