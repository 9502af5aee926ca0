"""Workloads, and running one through the engine: rows of token ids and `max_tokens`, end tokens ignored.

The same rows give the same work to any other program, so that figures can be compared side by side.
"""

from __future__ import annotations

import csv
import json
import random
import time
from contextlib import nullcontext
from dataclasses import dataclass, fields
from pathlib import Path

from batchjob.bench.limits import Limits
from batchjob.core.order import arrange
from batchjob.engine import Engine, EngineConfig
from batchjob.engine.engine import EngineStats
from batchjob.records import Request
from batchjob.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Row:
    token_ids: list[int]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Result:
    name: str
    num_rows: int
    num_prompt_tokens: int
    num_output_tokens: int
    seconds: float
    stats: EngineStats
    shares: str | None = None
    flops: float = 0.0  # of linear layers

    def render(self, limits: Limits | None) -> str:
        total = self.num_prompt_tokens + self.num_output_tokens
        lines = [
            f"{self.name}: {self.seconds:.1f} s, {self.num_output_tokens / self.seconds:.1f} output tok/s, "
            f"{total / self.seconds:.1f} total tok/s, {self.num_rows / self.seconds:.2f} rows/s",
            f"  {self.stats.num_steps} steps, {self.stats.num_prompt_tokens_computed:,} prompt tokens computed, "
            f"{self.stats.num_cached_tokens:,} from the prefix cache, {self.stats.num_preemptions} preemptions",
        ]
        if self.shares is not None:
            lines.append(f"  time: {self.shares}")
        if limits is not None and self.flops:
            bound = self.flops / limits.flops
            lines.append(
                f"  limit: {bound:.1f} s for {self.flops / 1e12:.2f} TFLOP of linear layers at {limits.render()}; "
                f"this run is at {bound / self.seconds:.0%} of it"
            )
        return "\n".join(lines)


def read_workload(path: Path) -> list[Row]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [Row(row["ids"], row["max_tokens"]) for row in rows]


def published_rows(
    count: int = 256, *, shortest: int = 100, longest: int = 1024, largest_id: int = 10_000, seed: int = 0
) -> list[Row]:
    """The workload that nano-vllm and mini-sglang publish figures for, with their calls of the random generator in
    their order, so that the rows are the same: 142,827 tokens in, 133,966 out."""
    rng = random.Random(seed)
    prompts = [[rng.randint(0, largest_id) for _ in range(rng.randint(shortest, longest))] for _ in range(count)]
    return [Row(prompt, rng.randint(shortest, longest)) for prompt in prompts]


def length_rows(path: Path, *, largest_id: int = 10_000, seed: int = 0) -> list[Row]:
    """Rows of the lengths in a CSV file with columns `prompt_tokens` and `output_tokens`; random token ids."""
    rng = random.Random(seed)
    with path.open(newline="") as file:
        lengths = [(int(row["prompt_tokens"]), int(row["output_tokens"])) for row in csv.DictReader(file)]
    return [Row([rng.randint(0, largest_id) for _ in range(prompt)], output) for prompt, output in lengths]


def run_workload(
    model: str | Path, name: str, rows: list[Row], config: EngineConfig, *, profile: bool = False
) -> Result:
    """Loads the model, warms up with a few short rows, then runs all rows. Loading is not part of the time."""
    from batchjob.engine.runner import TorchRunner

    engine = Engine(TorchRunner(model, config), NoText(), config)
    try:
        # Backwards, so that the prefix cache has nothing of theirs afterwards.
        complete(engine, [Row(row.token_ids[:64][::-1], 4) for row in rows[:4]])
        before = engine.stats
        shares_context: object
        if profile:
            from batchjob.bench.shares import measure_shares

            shares_context = measure_shares()
        else:
            shares_context = nullcontext()
        with shares_context as shares:  # type: ignore[attr-defined]
            started = time.perf_counter()
            num_output_tokens = complete(engine, rows)
            seconds = time.perf_counter() - started
        stats = difference(engine.stats, before)
    finally:
        engine.close()
    return Result(
        name=name,
        num_rows=len(rows),
        num_prompt_tokens=sum(len(row.token_ids) for row in rows),
        num_output_tokens=num_output_tokens,
        seconds=seconds,
        stats=stats,
        shares=None if shares is None else shares.render(seconds, stats.runner_seconds),
        flops=0.0 if shares is None else shares.flops,
    )


def difference(after: EngineStats, before: EngineStats) -> EngineStats:
    """The work of an engine in between."""
    return EngineStats(*(getattr(after, f.name) - getattr(before, f.name) for f in fields(EngineStats)))


class NoText:
    """Gives no text: a workload counts tokens."""

    special_tokens = ()

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return ""


def complete(engine: Engine, rows: list[Row]) -> int:
    """Runs the rows in the engine's own order and returns how many tokens came out."""
    add_rows(engine, rows)
    num_tokens = 0
    while engine.has_unfinished():
        num_tokens += sum(len(completion.token_ids) for completion in engine.step())
    return num_tokens


def add_rows(engine: Engine, rows: list[Row], *, temperature: float = 0.0) -> None:
    """Queues the rows in the engine's own order. Raises ValueError for one that cannot run."""
    requests = [
        Request(
            i,
            0,
            row.token_ids,
            SamplingParams(temperature=temperature, max_tokens=row.max_tokens, ignore_eos=True),
            stream=i,
        )
        for i, row in enumerate(rows)
    ]
    for request in arrange(requests, "auto"):
        refused = engine.add(request)
        if refused is not None and refused.error is not None:
            raise ValueError(f"row {request.row_index}: {refused.error.message}")
