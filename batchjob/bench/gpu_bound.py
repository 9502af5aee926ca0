"""The least time that a workload can take on a device of certain limits, by a small simulation of its batch over time.

Each step must read all weights and the keys and values of its sequences once, and must multiply each of its tokens with
the weights and with the keys and values it attends to. Its bound is the greater of two times: bytes at the measured
copy bandwidth, and products at the measured rate of a large matrix product; so reading and computing are taken to
overlap perfectly, and everything else (sampling, norms, launches, the host) to cost nothing. The steps are those of
continuous batching: up to `max_num_seqs` rows run, the longest first, every running row makes a token per step, and
prompts fill a step up to `max_num_batched_tokens`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from batchjob.bench.gpu_shapes import Shape
from batchjob.bench.limits import Limits


@dataclass(frozen=True, slots=True)
class Bound:
    seconds: float
    num_steps: int
    num_output_tokens: int
    compute_seconds: float  # of the steps that are bound by products

    @property
    def output_rate(self) -> float:
        """Output tokens per second."""
        return self.num_output_tokens / self.seconds


@dataclass(slots=True)
class _Run:
    prompt: int  # tokens still to compute
    cached: int  # tokens in the cache
    left: int  # output tokens still to make


def workload_bound(
    shape: Shape,
    lengths: Iterable[tuple[int, int]],
    limits: Limits,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    weight_bytes: int = 2,
    kv_bytes: int = 2,
) -> Bound:
    """`lengths` are (prompt tokens, output tokens) of each row, at least one of each; the last two arguments are bytes
    per number."""
    waiting = sorted(lengths, key=sum)  # taken from the end
    num_output_tokens = sum(output for _, output in waiting)
    running: list[_Run] = []
    seconds = compute_seconds = 0.0
    num_steps = 0
    while waiting or running:
        budget = max_num_batched_tokens
        tokens = sampled = pairs = read = 0  # pairs of query and key; tokens whose keys and values are read
        for run in running:
            if run.prompt == 0:
                tokens, sampled, budget = tokens + 1, sampled + 1, budget - 1
                run.cached += 1
                pairs, read = pairs + run.cached, read + run.cached
                run.left -= 1
        in_prompt = [run for run in running if run.prompt]
        while budget > 0 and (in_prompt or (waiting and len(running) < max_num_seqs)):
            if in_prompt:
                run = in_prompt.pop(0)
            else:
                run = _Run(waiting[-1][0], 0, waiting[-1][1])
                waiting.pop()
                running.append(run)
            piece = min(budget, run.prompt)
            pairs += piece * run.cached + piece * (piece + 1) // 2
            run.cached, run.prompt = run.cached + piece, run.prompt - piece
            tokens, read, budget = tokens + piece, read + run.cached, budget - piece
            if run.prompt == 0:
                sampled, run.left = sampled + 1, run.left - 1
        running = [run for run in running if run.prompt or run.left > 0]
        flops, num_bytes = step_work(
            shape, tokens=tokens, sampled=sampled, pairs=pairs, read=read, weight_bytes=weight_bytes, kv_bytes=kv_bytes
        )
        by_products, by_bytes = flops / limits.flops, num_bytes / limits.bytes_per_second
        seconds += max(by_products, by_bytes)
        compute_seconds += by_products if by_products > by_bytes else 0.0
        num_steps += 1
    return Bound(seconds, num_steps, num_output_tokens, compute_seconds)


def step_work(
    shape: Shape, *, tokens: int, sampled: int, pairs: int, read: int, weight_bytes: int = 2, kv_bytes: int = 2
) -> tuple[float, float]:
    """(floating-point operations, bytes) of one step: `pairs` of query and key, `read` cached tokens. A multiply-add is
    two operations; a pair costs one for the score and one for the value, per dimension of each head of each layer."""
    attention = 4 * shape.num_layers * shape.num_heads * shape.head_dim * pairs
    flops = 2 * (shape.linear_weights * tokens + shape.head_weights * sampled) + attention
    weights = shape.linear_weights + (shape.head_weights if sampled else 0)
    return float(flops), float(weights * weight_bytes + shape.kv_numbers * kv_bytes * (read + tokens))
