"""`python -m batchjob.bench.host`: what a decode step costs the host, in microseconds per sequence, without any model.

Engine, scheduler and the making of a step's inputs are the real ones; the tokens are made up. Three ways are compared:
all inputs of each step made on the host (what a CPU uses), state on the device (only what is new is sent), and several
steps per launch.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from batchjob.core.step_plan import StepPlan
from batchjob.engine import Capacity, Engine, EngineConfig
from batchjob.engine.steps.device_state import DeviceState
from batchjob.engine.steps.packing import Packer
from batchjob.engine.steps.step_inputs import InputBuilder
from batchjob.records import Request
from batchjob.sampling import SamplingParams

_BLOCK_SIZE = 16
_MAX_MODEL_LEN = 4096


class _Handle:
    def __init__(self, tokens: list[list[int]]) -> None:
        self._tokens = tokens

    def tokens(self) -> list[list[int]]:
        return self._tokens


class _NoModel:
    """Makes the inputs of each step, and nothing of them. Counts the seconds that it takes."""

    def __init__(self, num_seqs: int, make_inputs: Callable[[StepPlan], object]) -> None:
        self._num_seqs = num_seqs
        self._make_inputs = make_inputs
        self.seconds = 0.0

    def capacity(self) -> Capacity:
        num_blocks = self._num_seqs * _MAX_MODEL_LEN // _BLOCK_SIZE
        return Capacity(num_blocks, _BLOCK_SIZE, self._num_seqs, 1 << 20, 1 << 16, "no model")

    def execute(self, plan: StepPlan) -> _Handle:
        started = time.perf_counter()
        self._make_inputs(plan)
        self.seconds += time.perf_counter() - started
        return _Handle([[7] * len(plan.sampled)] * plan.num_steps)

    def close(self) -> None:
        """Nothing to free."""


class _NoText:
    special_tokens = ()

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return ""


def host_cost(num_seqs: int, *, on_device: bool, num_steps: int, num_launches: int = 200) -> tuple[float, float]:
    """(microseconds per sequence and decode step in all, those of making inputs)."""
    limits = {"max_num_seqs": num_seqs, "max_blocks_per_seq": _MAX_MODEL_LEN // _BLOCK_SIZE, "block_size": _BLOCK_SIZE}
    device = torch.device("cpu")
    if on_device:
        builder = InputBuilder(**limits, min_tokens_saved=1 << 17)
        state = DeviceState(**limits, null_block=0, device=device)

        def make_inputs(plan: StepPlan) -> object:
            return state.receive(builder.build(plan))
    else:
        make_inputs = Packer(**limits, null_block=0, device=device).pack
    runner = _NoModel(num_seqs, make_inputs)
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
    ways = [("inputs from the host", False, 1), ("state on the device", True, 1)]
    ways += [(f"{steps} steps per launch", True, steps) for steps in (4, 8)]
    print(f"{'sequences':>9}  {'way':<22}  {'host us/seq/step':>16}  {'of it inputs':>12}")
    for num_seqs in args.num_seqs:
        for name, on_device, num_steps in ways:
            total, inputs = min(host_cost(num_seqs, on_device=on_device, num_steps=num_steps) for _ in range(args.runs))
            print(f"{num_seqs:>9}  {name:<22}  {total:>16.3f}  {inputs:>12.3f}", flush=True)


if __name__ == "__main__":
    main()
