"""`DecodeGraphs`: decode steps as CUDA graphs, one per padded batch size. Launching a model's kernels one by one takes
the host longer than a GPU needs to run them; a graph is launched as one.

A graph is captured when its size is first needed: a job makes its first tokens sooner, and most sizes never come up.
All share one pool of memory, for which `memory` leaves room, and one tensor for their logits. Warm-up and capture run
on one stream for all graphs: PyTorch keeps memory, and cuBLAS a workspace, for every stream that was ever used.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from batchjob.engine.steps.decode_batch import DecodeBatch

logger = logging.getLogger(__name__)


class Captured(NamedTuple):
    replay: Callable[[], object]
    batch: DecodeBatch  # what it reads
    logits: Tensor  # what it writes


MAX_GRAPHS = 24


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes with a graph of their own, ascending, at most 24: 1, 2, 4, then in steps of at most an eighth of the
    size (a quarter, or half, where that would be too many), so that little is computed for rows that only fill up."""
    for parts in (8, 4, 2):
        sizes = [size for size in (1, 2, 4) if size < max_num_seqs]
        size = step = 8
        while size < max_num_seqs:
            sizes.append(size)
            if size >= parts * step:
                step *= 2
            size += step
        if len(sizes) < MAX_GRAPHS:
            break
    return [*sizes, max_num_seqs]


class DecodeGraphs:
    def __init__(
        self,
        make_batch: Callable[[int], DecodeBatch],
        run_batch: Callable[[DecodeBatch], Tensor],
        max_num_seqs: int,
    ) -> None:
        """`run_batch` gives the logits of a batch; it must not wait for the device nor look at its data."""
        self._make_batch = make_batch
        self._run_batch = run_batch
        self.sizes = graph_sizes(max_num_seqs)
        self._captured: dict[int, Captured] = {}
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        self._logits: Tensor | None = None  # [max_num_seqs, vocab], of whatever graph ran last
        self.refused: str | None = None  # why no graph is used

    @property
    def num_captured(self) -> int:
        return len(self._captured)

    def run(self, slots: Tensor) -> Tensor | None:
        """Logits [len(slots), vocab] of one decode step of these slots; valid until the next call. None: no graph."""
        size = self.sizes[bisect_left(self.sizes, len(slots))]
        captured = self._captured.get(size) or self.capture(size)
        if captured is None:
            return None
        batch = captured.batch
        batch.slots[: len(slots)].copy_(slots)
        batch.slots[len(slots) :].fill_(batch.dummy)
        captured.replay()
        return captured.logits[: len(slots)]

    def capture(self, size: int) -> Captured | None:
        """Captures the graph of a size. None where the model cannot be captured; it is not tried again then."""
        if self.refused is not None:
            return None
        batch = self._make_batch(size)
        self._warm_up(batch)  # outside of the try: what fails here is no matter of graphs
        try:
            self._captured[size] = self._record(batch)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            cause: BaseException = error
            while isinstance(cause.__context__, RuntimeError):  # ending a capture that has failed is an error as well
                cause = cause.__context__
            self.refused = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
            logger.warning("decode steps run without CUDA graphs: the model cannot be captured (%s)", self.refused)
            return None
        return self._captured[size]

    def _warm_up(self, batch: DecodeBatch) -> None:
        """Compiles kernels, and makes what the graphs share: their pool, their stream, the logits that all write."""
        current = torch.cuda.current_stream()
        if self._pool is None:
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        assert self._stream is not None
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            logits = self._run_batch(batch)
        current.wait_stream(self._stream)
        torch.cuda.synchronize()
        if self._logits is None:
            self._logits = logits.new_empty(self.sizes[-1], logits.shape[1])

    def _record(self, batch: DecodeBatch) -> Captured:
        assert self._logits is not None
        current = torch.cuda.current_stream()
        out = self._logits[: len(batch.slots)]
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                out.copy_(self._run_batch(batch))
        finally:
            torch.cuda.set_stream(current)  # a capture that fails leaves its own one
        return Captured(graph.replay, batch, out)
