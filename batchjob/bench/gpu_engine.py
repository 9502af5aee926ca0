"""Throughput of one engine configuration: start, warm-up, then whole workloads against their bound."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import torch

from batchjob.bench.gpu_bound import workload_bound
from batchjob.bench.gpu_profile import profile_decode
from batchjob.bench.gpu_shapes import SHAPES, Shape, build
from batchjob.bench.gpu_task import ROOT, Report, Task
from batchjob.bench.workload import NoText, Row, add_rows, difference, length_rows, published_rows
from batchjob.engine import Engine, EngineConfig
from batchjob.errors import EngineError

TEMPERATURE = 0.6  # as in the published workload
_WARM_UP_TOKENS = 64


def shape_of(task: Task) -> Shape:
    shape = SHAPES[task.options["shape"]]
    return shape.tiny() if task.tiny else shape


def workload(name: str, *, tiny: bool) -> list[Row]:
    """`published` or `azure`; for a rehearsal a few short rows of each."""
    if name == "published":
        if tiny:
            return published_rows(10, shortest=3, longest=12, largest_id=500)
        return published_rows()
    rows = length_rows(ROOT / "data" / "azure_lengths_200.csv", largest_id=500 if tiny else 10_000)
    return (
        [Row(row.token_ids[: 1 + len(row.token_ids) % 50], 1 + row.max_tokens % 8) for row in rows[:6]]
        if tiny
        else rows
    )


def measure(task: Task, report: Report) -> None:
    """Options: `shape`, `workloads` (names, in order), `profile` (whether to look into a decode step)."""
    from batchjob.engine.runner import TorchRunner

    shape = shape_of(task)
    names: list[str] = task.options.get("workloads", ["published"])
    workloads = {name: workload(name, tiny=task.tiny) for name in names}
    config = make_config(task, [row for rows in workloads.values() for row in rows])
    report.add(config={name: value for name, value in asdict(config).items() if value is not None})
    started = time.perf_counter()
    try:
        runner = TorchRunner(lambda: model_of(task, shape), config)
    except EngineError as error:
        if "attention_backend" not in task.settings:
            raise
        report.add(engine=f"refused: {error}")  # this device or this model is not for that backend: a finding
        return
    engine = Engine(runner, NoText(), config)
    report.add(start=_describe_start(runner, engine, time.perf_counter() - started))
    report.add(warm_up_seconds=warm_up(engine, workloads[names[0]], largest_id=shape.vocab_size - 1))
    for name, rows in workloads.items():
        if report.seconds_left < 2:
            report.add(**{name: {"skipped": "no time left"}})
            continue
        report.add(**{name: run_rows(engine, rows, task, report, shape)})
    if task.device != "cpu":
        report.add(peak_memory_gib=torch.cuda.max_memory_allocated() / 2**30, graphs=_num_graphs(runner))
    if task.options.get("profile"):
        rows = workloads[names[0]]
        report.attempt("profile", lambda: profile_decode(engine, rows, task, report, shape))


def make_config(task: Task, rows: list[Row]) -> EngineConfig:
    settings: dict[str, Any] = {
        "max_model_len": max(len(row.token_ids) + row.max_tokens for row in rows) + 1,
        "max_num_seqs": min(256, max(len(rows), 1)),
        "dtype": task.dtype_name,
        "device": task.device,
        **({"kv_cache_bytes": 2**22} if task.device == "cpu" else {}),
        **task.settings,
    }
    return EngineConfig(**settings)


def model_of(task: Task, shape: Shape) -> torch.nn.Module:
    return build(shape, device=task.torch_device, dtype=getattr(torch, task.dtype_name))


def warm_up(engine: Engine, rows: list[Row], *, largest_id: int) -> float:
    """Seconds of a run that visits every size of decode step and prompts of all lengths, so that kernels are compiled
    and graphs captured.

    As many rows as run at once, whose ends are spread over the run. Every fourth has a prompt as long as one of the
    workload's, of other tokens.
    """
    started = time.perf_counter()
    count = engine.capacity.max_num_seqs
    spread = max(1, -(-count // _WARM_UP_TOKENS))
    short = []
    for i in range(count):
        prompt = rows[i % len(rows)].token_ids if i % 4 == 0 else [i, i // 7, 3, 4, 5]
        num_tokens = 2 + i // spread + max(0, i - count + 4)  # the last ones end one by one
        short.append(Row([largest_id - token % largest_id for token in prompt], num_tokens))
    add_rows(engine, short, temperature=TEMPERATURE)
    while engine.has_unfinished():
        engine.step()
    return time.perf_counter() - started


def run_rows(engine: Engine, rows: list[Row], task: Task, report: Report, shape: Shape) -> dict[str, Any]:
    """Runs the rows, or as many of their steps as there is time for; then the figures are of the part that ran."""
    before, started = engine.stats, time.perf_counter()
    add_rows(engine, rows, temperature=TEMPERATURE)
    stop = report.deadline - 1.5
    num_done = 0
    while engine.has_unfinished() and time.monotonic() < stop:
        num_done += len(engine.step())
    seconds = time.perf_counter() - started
    stats = difference(engine.stats, before)
    is_whole = not engine.has_unfinished()
    num_output_tokens = stats.num_sampled - stats.num_wasted
    result: dict[str, Any] = {
        "rows": num_done,
        "whole": is_whole,
        "seconds": seconds,
        "output_tokens": num_output_tokens,
        "output_tok_s": num_output_tokens / seconds,
        "total_tok_s": (num_output_tokens + stats.num_prompt_tokens_computed) / seconds,
        "stats": asdict(stats),
    }
    if is_whole and task.limits is not None:
        bound = workload_bound(
            shape,
            [(len(row.token_ids), row.max_tokens) for row in rows],
            task.limits,
            max_num_seqs=engine.capacity.max_num_seqs,
            max_num_batched_tokens=engine.capacity.max_num_batched_tokens,
            kv_bytes=1 if task.settings.get("kv_cache_dtype") == "fp8" else 2,
        )
        result |= {
            "bound_output_tok_s": bound.output_rate,
            "bound_seconds": bound.seconds,
            "bound_steps": bound.num_steps,
            "fraction_of_bound": bound.seconds / seconds,
        }
    if not is_whole:
        result["note"] = "cut off for lack of time"
        engine.drop_waiting()
        engine.drop_running()
        while engine.has_unfinished():
            engine.step()
    return result


def _describe_start(runner: Any, engine: Engine, seconds: float) -> dict[str, Any]:
    model = getattr(runner, "_model", None)
    return {
        "seconds": seconds,
        "parts": dict(getattr(runner, "seconds", {})),
        "description": engine.capacity.description,
        "backend": getattr(getattr(model, "backend", None), "name", None),
        "backend_reason": getattr(getattr(model, "backend", None), "reason", None),
        "fused": getattr(model, "fused", None),
        "max_num_batched_tokens": engine.capacity.max_num_batched_tokens,
        "kv_blocks": engine.capacity.num_blocks,
    }


def _num_graphs(runner: Any) -> dict[str, Any]:
    graphs = getattr(getattr(runner, "_steps", None), "graphs", None)
    return {"captured": getattr(graphs, "num_captured", 0), "refused": getattr(graphs, "refused", None)}
