"""A feeder without a process of its own: tests that are not about the process are faster with it.

`monkeypatch.setattr("batchjob.prompts.feeder.Feeder", InlineFeeder)` puts it in the place of the real one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator

from batchjob.errors import BatchJobError
from batchjob.plan import Chunk
from batchjob.prompts.feeder import FedBatch, FeederConfig
from batchjob.prompts.feeder.batches import Source


class InlineFeeder:
    """A PromptFeeder in this process and thread."""

    def __init__(self, config: FeederConfig, echo: Callable[[str], None] | None = None) -> None:
        """`echo` is a Feeder's: nothing happens here that it would tell."""
        self._source = Source(config)
        self._queue: deque[Iterator[FedBatch]] = deque()
        self._failure: BatchJobError | None = None

    def feed(self, chunk: Chunk, skip_rows: Collection[int] = ()) -> None:
        self._queue.append(self._source.batches(chunk, frozenset(skip_rows)))

    def poll(self, timeout: float = 0.0) -> list[FedBatch]:
        if self._failure is not None:
            raise self._failure
        if not self._queue:
            return []
        try:
            batch = next(self._queue[0])
        except BatchJobError as error:
            self._failure = error
            raise
        if batch.last:
            self._queue.popleft()
        return [batch]

    def close(self) -> None:
        self._queue.clear()
        self._source.close()
