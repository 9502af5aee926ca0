"""Decode batches of a few sizes, padded, as a graph sees them. Capture itself needs a GPU: here it is played."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import FAMILIES, save
from hypothesis import given
from hypothesis import strategies as st

from batchjob.engine import Engine, EngineConfig, runner
from batchjob.engine.runner import TorchRunner
from batchjob.engine.steps.decode_batch import DecodeBatch
from batchjob.engine.steps.graphs import MAX_GRAPHS, Captured, DecodeGraphs, graph_sizes
from batchjob.records import Request
from batchjob.sampling import SamplingParams
from batchjob_kernels import AttnMeta
from batchjob_kernels.attention import reference


@given(st.integers(1, 5000))
def test_sizes_reach_the_largest_batch_with_little_padding(max_num_seqs: int) -> None:
    sizes = graph_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes))
    assert len(sizes) <= MAX_GRAPHS
    assert sizes[-1] == max_num_seqs
    for smaller, larger in pairwise(sizes):
        assert smaller < 8 or larger - smaller <= max(8, smaller // 2)


class NoText:
    special_tokens = ()

    def decode(self, ids: list[int]) -> str:
        return ""


def run(path: Path, **settings: Any) -> dict[int, list[int]]:
    torch.set_num_threads(1)
    config = EngineConfig(max_model_len=48, max_num_seqs=13, block_size=4, eos_token_ids=(2,), **settings)
    engine = Engine(TorchRunner(path, config), NoText(), config)
    rng = random.Random(1)
    for row in range(20):
        params = SamplingParams(max_tokens=rng.randint(1, 16), temperature=row % 2)
        engine.add(Request(row, 0, [rng.randrange(3, 96) for _ in range(rng.randint(1, 9))], params, stream=row))
    tokens = {}
    while engine.has_unfinished():
        tokens.update({completion.row_index: completion.token_ids for completion in engine.step()})
    return tokens


def test_padded_batches_give_the_tokens_of_plain_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture reads and writes fixed tensors only: the play repeats the batch on the tensors it was made with. What a
    backend keeps from one layer to the next of a step is no such tensor."""
    path = save(tmp_path / "llama", *FAMILIES["llama"])
    expected = run(path)
    write_kv = reference.write_kv

    def write_to_kept_slots(kv: torch.Tensor, cache: torch.Tensor, meta: AttnMeta) -> None:
        kept = meta.memo.setdefault("slot_mapping", meta.slot_mapping.clone())
        write_kv(kv, cache, replace(meta, slot_mapping=kept))

    monkeypatch.setattr(reference, "write_kv", write_to_kept_slots)
    sizes: list[tuple[int, int]] = []

    def record(self: DecodeGraphs, batch: DecodeBatch) -> Captured:
        logits = self._run_batch(batch).clone()

        def replay() -> None:
            sizes.append((len(batch.slots), int((batch.slots != batch.dummy).sum())))
            logits.copy_(self._run_batch(batch))

        return Captured(replay, batch, logits)

    monkeypatch.setattr(DecodeGraphs, "_record", record)
    monkeypatch.setattr(DecodeGraphs, "_warm_up", lambda self, batch: None)
    monkeypatch.setattr(reference, "USES_DEVICE_LENS", True)
    make = runner.Steps
    monkeypatch.setattr(runner, "Steps", lambda *a, **kw: make(*a, **{**kw, "use_graphs": True}))
    for num_steps in (1, 3):
        sizes.clear()
        actual = run(path, attention_backend="reference", async_scheduling=True, decode_steps_per_launch=num_steps)
        assert actual == expected
        assert {size for size, _ in sizes} <= {1, 2, 4, 8, 13}
        assert any(used < size for size, used in sizes)


class PlayedCuda:
    """Stands in for `torch.cuda`. A capture runs its step; a replay does nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stream_now = self.main = self.Stream()
        self.captured_on: list[Any] = []
        for name in ("Stream", "stream", "graph", "set_stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.stream_now)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))

    class Stream:
        def wait_stream(self, other: Any) -> None:
            pass

    def set_stream(self, stream: Any) -> None:
        self.stream_now = stream

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.stream_now = self.stream_now, stream
        yield
        self.stream_now = before

    @contextmanager
    def graph(self, graph: Any, *, pool: Any, stream: Any) -> Iterator[None]:
        assert pool == "pool"
        before, self.stream_now = self.stream_now, stream
        self.captured_on.append(stream)
        yield  # as PyTorch's, it stays on the stream where the end of the capture fails
        self.stream_now = before


def played_batch(size: int) -> Any:
    return SimpleNamespace(slots=torch.zeros(size, dtype=torch.int64), dummy=9)


def test_graphs_share_one_stream_and_one_tensor_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = PlayedCuda(monkeypatch)
    graphs = DecodeGraphs(played_batch, lambda batch: torch.full((len(batch.slots), 5), float(len(batch.slots))), 8)
    for count, size in ((3, 4), (8, 8), (1, 1), (2, 2)):
        logits = graphs.run(torch.arange(count))
        assert logits is not None
        assert torch.equal(logits, torch.full((count, 5), float(size)))
    assert graphs.num_captured == 4
    assert len({captured.logits.data_ptr() for captured in graphs._captured.values()}) == 1
    assert len(set(map(id, cuda.captured_on))) == 1
    assert cuda.stream_now is cuda.main


def test_after_a_capture_that_failed_work_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = PlayedCuda(monkeypatch)

    def run(batch: Any) -> torch.Tensor:
        if cuda.captured_on:
            raise RuntimeError("operation not permitted when stream is capturing")
        return torch.zeros(len(batch.slots), 5)

    graphs = DecodeGraphs(played_batch, run, 8)
    assert graphs.run(torch.arange(3)) is None
    assert graphs.refused == "operation not permitted when stream is capturing"
    assert cuda.stream_now is cuda.main


def test_the_reason_against_graphs_is_the_first_error() -> None:
    def fail(batch: Any) -> Any:
        try:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    graphs = DecodeGraphs(lambda size: None, fail, 8)  # type: ignore[arg-type, return-value]
    graphs._warm_up = lambda batch: None  # type: ignore[method-assign, assignment]
    graphs._record = fail  # type: ignore[method-assign]
    assert graphs.run(torch.zeros(3, dtype=torch.int64)) is None
    assert graphs.refused == "operation not permitted when stream is capturing"


def test_a_model_that_cannot_be_captured_runs_without(caplog: pytest.LogCaptureFixture) -> None:
    def fail(batch: DecodeBatch) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    graphs = DecodeGraphs(lambda size: None, fail, 8)  # type: ignore[arg-type, return-value]
    graphs._warm_up = lambda batch: None  # type: ignore[method-assign, assignment]
    graphs._record = fail  # type: ignore[method-assign]
    assert graphs.run(torch.zeros(3, dtype=torch.int64)) is None
    assert graphs.refused == "operation not permitted when stream is capturing"
    assert "without CUDA graphs" in caplog.text
    assert graphs.run(torch.zeros(3, dtype=torch.int64)) is None
    assert caplog.text.count("without CUDA graphs") == 1


def test_an_error_before_the_capture_is_no_reason_against_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a model split over processes, one that goes on without graphs would add to other sums than the others."""
    PlayedCuda(monkeypatch)

    def fail(batch: Any) -> Any:
        raise RuntimeError("a sum over processes failed")

    graphs = DecodeGraphs(played_batch, fail, 8)
    with pytest.raises(RuntimeError, match="a sum over processes failed"):
        graphs.run(torch.arange(3))
    assert graphs.refused is None
