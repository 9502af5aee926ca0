"""The same rows by Transformers itself: continuous batching (`generate_batch`) at its best settings, and `generate`."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from batchjob.bench.gpu_engine import TEMPERATURE, shape_of, workload
from batchjob.bench.gpu_shapes import build
from batchjob.bench.gpu_task import Report, Task
from batchjob.bench.workload import Row

_STATIC_BATCH = 64


def _model(task: Task) -> nn.Module:
    device, dtype = task.torch_device, getattr(torch, task.dtype_name)
    return build(shape_of(task), device=device, dtype=dtype, attention="sdpa")


def _generation_config(max_new_tokens: int, **more: Any) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=True,
        temperature=TEMPERATURE,
        top_k=0,
        top_p=1.0,
        eos_token_id=-1,  # no token: rows run to their length
        pad_token_id=0,
        **more,
    )


def generate_batch(task: Task, report: Report) -> None:
    """Its manager is used directly, as `generate_batch` does, because that gives all rows the same length of output.

    The task's settings are those of its configuration. Options: `shape`, `workload`.
    """
    rows = workload(task.options["workload"], tiny=task.tiny)
    model = _model(task)
    _continuous(model, rows, task, report)


def _continuous(model: Any, rows: list[Row], task: Task, report: Report) -> None:
    from transformers import ContinuousBatchingConfig

    sizes: dict[str, Any] = {"num_blocks": 64, "max_batch_tokens": 256} if task.device == "cpu" else {}
    started = time.perf_counter()
    with model.continuous_batching_context_manager(
        generation_config=_generation_config(max(row.max_tokens for row in rows)),
        continuous_batching_config=ContinuousBatchingConfig(**task.settings, **sizes),
        workload_hints=_hints(rows),
        block=True,
        timeout=5,
    ) as manager:
        # The second pass has kernels and graphs behind it, as the engine after its warm-up.
        short = [Row(row.token_ids[::-1], 8 + i % 32) for i, row in enumerate(rows[: max(2, len(rows) // 4)])]
        _collect(manager, short, report)
        ready = time.perf_counter()
        num_done, num_tokens = _collect(manager, rows, report)
        seconds = time.perf_counter() - ready
        result: dict[str, Any] = {
            "start_seconds": ready - started,
            "rows": num_done,
            "whole": num_done == len(rows),
            "seconds": seconds,
            "output_tokens": num_tokens,
            "output_tok_s": num_tokens / seconds,
        }
        if num_done < len(rows):
            result["note"] = "cut off; tokens of unfinished rows are not counted"
        # Before the manager is stopped, which can take longer than there is time.
        report.add(attention=_attention_name(model), **{task.options["workload"]: result})


def _hints(rows: list[Row]) -> Any:
    from transformers.generation.continuous_batching.utils import WorkloadHints

    return WorkloadHints(
        max_prompt_length=max(len(row.token_ids) for row in rows),
        max_generated_length=max(row.max_tokens for row in rows),
        num_requests=len(rows),
    )


def _collect(manager: Any, rows: list[Row], report: Report) -> tuple[int, int]:
    for row in rows:
        if manager.add_request(list(row.token_ids), max_new_tokens=row.max_tokens) is None:
            raise RuntimeError("a request was refused")
    num_done = num_tokens = 0
    while num_done < len(rows) and report.seconds_left > 3:
        result = manager.get_result(timeout=0.5)
        if result is None:
            if not manager.is_running():
                raise RuntimeError("the thread that generates has died")
        elif result.is_finished():
            if result.error is not None:
                raise RuntimeError(str(result.error))
            num_done, num_tokens = num_done + 1, num_tokens + len(result.generated_tokens)
    return num_done, num_tokens


def _attention_name(model: Any) -> str:
    return str(getattr(model.config, "_attn_implementation", "?"))


def generate(task: Task, report: Report) -> None:
    """Batches of rows whose prompts are about as long, padded on the left; each runs to its longest row's end, and only
    the tokens that its rows asked for count. Options: `shape`, `workload`."""
    rows = sorted(workload(task.options["workload"], tiny=task.tiny), key=lambda row: len(row.token_ids))
    size = min(_STATIC_BATCH, -(-len(rows) // 2))
    model: Any = _model(task)
    _static(model, [Row(row.token_ids, 4) for row in rows[:size]], task, 1e9)
    started = time.perf_counter()
    num_tokens = num_done = 0
    whole = True
    # Whole batches from the middle first: should time run out, they stand best for all.
    starts = sorted(range(0, len(rows), size), key=lambda start: abs(start + size / 2 - len(rows) / 2))
    for start in starts:
        batch = rows[start : start + size]
        made = _static(model, batch, task, report.seconds_left - 4)
        num_tokens += sum(min(made, row.max_tokens) for row in batch)
        num_done += len(batch)
        whole = made >= max(row.max_tokens for row in batch)
        seconds = time.perf_counter() - started
        is_last = not whole or report.seconds_left < 5
        result: dict[str, Any] = {
            "batch_size": size,
            "rows": num_done,
            "whole": whole and num_done == len(rows),
            "seconds": seconds,
            "output_tokens": num_tokens,
            "output_tok_s": num_tokens / seconds,
        }
        if is_last and not result["whole"]:
            result["note"] = "cut off for lack of time; the rate is that of the part that ran"
        report.add(attention=_attention_name(model), **{task.options["workload"]: result})
        if is_last:
            break


@torch.inference_mode()
def _static(model: Any, batch: list[Row], task: Task, max_seconds: float) -> int:
    """Tokens generated for each row."""
    longest = max(len(row.token_ids) for row in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(batch):
        ids[index, longest - len(row.token_ids) :] = torch.tensor(row.token_ids)
        mask[index, longest - len(row.token_ids) :] = 1
    out: Tensor = model.generate(
        ids.to(task.torch_device),
        attention_mask=mask.to(task.torch_device),
        generation_config=_generation_config(max(row.max_tokens for row in batch), max_time=max(1.0, max_seconds)),
    )
    return out.cpu().shape[1] - longest
