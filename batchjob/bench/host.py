"""`python -m batchjob.bench.host`: what a decode step costs the host, in microseconds per sequence, without any model.

Engine, scheduler and the making of a step's inputs are the real ones; the tokens are made up. One step per launch is
compared with several.
"""

from __future__ import annotations

import argparse
import time

import torch

from batchjob.core.step_plan import StepPlan
from batchjob.engine import Capacity, Engine, EngineConfig, StepOutput
from batchjob.engine.kv_cache import KVCache, LayerShape
from batchjob.engine.steps.inputs import InputBuilder
from batchjob.engine.steps.prefix_groups import GPU_MIN_TOKENS_SAVED, PrefixGroups
from batchjob.engine.steps.state import DeviceState
from batchjob.records import Request
from batchjob.sampling import SamplingParams

_BLOCK_SIZE = 16
_MAX_MODEL_LEN = 4096


class _Handle:
    def __init__(self, tokens: list[list[int]]) -> None:
        self._tokens = tokens

    def result(self) -> StepOutput:
        return StepOutput(self._tokens)


class _NoModel:
    """Builds the inputs of each step and runs nothing. Counts the seconds that it takes."""

    def __init__(self, num_seqs: int) -> None:
        self._num_seqs = num_seqs
        limits = {"max_num_seqs": num_seqs, "max_blocks_per_seq": _MAX_MODEL_LEN // _BLOCK_SIZE}
        self._builder = InputBuilder(**limits, groups=PrefixGroups(_BLOCK_SIZE, GPU_MIN_TOKENS_SAVED), sorts_rows=False)
        cache = KVCache(
            [LayerShape(1, 1)], num_blocks=1, block_size=_BLOCK_SIZE, dtype=torch.float32, device=torch.device("cpu")
        )
        self._state = DeviceState(cache, **limits)
        self.seconds = 0.0

    def capacity(self) -> Capacity:
        num_blocks = self._num_seqs * _MAX_MODEL_LEN // _BLOCK_SIZE
        return Capacity(num_blocks, _BLOCK_SIZE, self._num_seqs, 1 << 20, 1 << 16, "no model")

    def execute(self, plan: StepPlan) -> _Handle:
        started = time.perf_counter()
        self._state.receive(self._builder.build(plan))
        self.seconds += time.perf_counter() - started
        return _Handle([[7] * len(plan.sampled)] * plan.num_steps)

    def close(self) -> None:
        """Nothing to free."""


class _NoText:
    special_tokens = ()

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return ""


def host_cost(num_seqs: int, *, num_steps: int, num_launches: int = 200) -> tuple[float, float]:
    """(microseconds per sequence and decode step in all, those of making inputs)."""
    runner = _NoModel(num_seqs)
    config = EngineConfig(max_model_len=_MAX_MODEL_LEN, decode_steps_per_launch=num_steps)
    engine = Engine(runner, _NoText(), config)
    for row in range(num_seqs):
        engine.add(Request(row, 0, [1 + row % 100] * (50 + row % 60), SamplingParams(), stream=row))
    for _ in range(5):
        engine.step()
    runner.seconds, before = 0.0, engine.stats.num_steps
    started = time.perf_counter()
    for _ in range(num_launches):
        engine.step()
    seconds = time.perf_counter() - started
    count = (engine.stats.num_steps - before) * num_seqs
    return seconds / count * 1e6, runner.seconds / count * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m batchjob.bench.host", description=__doc__)
    parser.add_argument("--num-seqs", type=int, nargs="*", default=[64, 256, 512])
    parser.add_argument("--runs", type=int, default=3, help="the best of so many is shown")
    args = parser.parse_args()
    print(f"{'sequences':>9}  {'steps per launch':>16}  {'host us/seq/step':>16}  {'of it inputs':>12}")
    for num_seqs in args.num_seqs:
        for num_steps in (1, 4, 8):
            total, inputs = min(host_cost(num_seqs, num_steps=num_steps) for _ in range(args.runs))
            print(f"{num_seqs:>9}  {num_steps:>16}  {total:>16.3f}  {inputs:>12.3f}", flush=True)


if __name__ == "__main__":
    main()
