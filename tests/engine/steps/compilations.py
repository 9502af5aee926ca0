"""Which variants of the Triton kernels a job would have compiled, printed as JSON: {kernel: number}.

A job runs as on a GPU, on tensors of the CPU, with Triton's driver and compiler played: kernels are neither compiled
nor launched, and what they should have written is zero. Run as a program of its own, without Triton's interpreter.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from types import ModuleType
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from batchjob.engine import Engine, EngineConfig, runner
from batchjob.engine.model import fuse
from batchjob.engine.model import load as model
from batchjob.engine.model.attention_hook import ATTENTION_NAME, register
from batchjob.engine.runner import TorchRunner
from batchjob.engine.sampling.sampler import Sampler
from batchjob.records import Request
from batchjob.sampling import SamplingParams
from batchjob_kernels.attention import triton as triton_backend
from batchjob_kernels.ops import triton as triton_ops
from batchjob_kernels.sampling import triton as sampling_ops
from batchjob_kernels.triton_kernels import attention_plan
from batchjob_kernels.triton_kernels import available as triton_here

ROWS = 40
variants: set[tuple[str, str]] = set()


class Driver:
    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_nothing(self: Any, key: str, *_: Any) -> None:
    variants.add((self.fn.__name__, key))


def play_gpu() -> None:
    driver.set_active(Driver())
    JITFunction._do_compile = compile_nothing
    outputs: dict[ModuleType, tuple[str, ...]] = {
        triton_backend: ("paged_attention",),
        triton_ops: ("rms_norm", "add_rms_norm", "act_and_mul", "rotary_write"),
        sampling_ops: ("group_weights", "draw", "ended"),
    }
    for module, names in outputs.items():
        for name in names:
            setattr(module, name, _zeroed(getattr(module, name)))
    triton_here.problem = lambda device: None
    attention_plan.device_facts = lambda device: ((9, 0), 32)
    model.logits_problem = lambda *_: None
    fuse._equal = lambda *_: True
    runner.fused_ops = lambda device, deterministic: triton_ops
    runner.Sampler = lambda *args, **more: Sampler(*args, **{**more, "use_triton": True})


def _zeroed(function: Any) -> Any:
    def call(*args: Any, **more: Any) -> Any:
        result = function(*args, **more)
        for tensor in result if isinstance(result, tuple) else (result,):
            tensor.zero_()
        return result

    return call


class NoText:
    special_tokens = ()

    def decode(self, ids: list[int]) -> str:
        return ""


def main() -> None:
    torch.set_num_threads(1)
    play_gpu()
    register()
    config = EngineConfig(
        max_model_len=400,
        max_num_seqs=ROWS,
        max_num_batched_tokens=512,
        dtype="bfloat16",
        attention_backend="triton",
        async_scheduling=True,
        decode_steps_per_launch=2,
    )
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 777, "head_dim": 16}
    made = Qwen3Config(num_attention_heads=16, num_key_value_heads=8, **sizes)

    def build() -> Any:
        return AutoModelForCausalLM.from_config(made, attn_implementation=ATTENTION_NAME, dtype=torch.bfloat16)

    engine = Engine(TorchRunner(build, config), NoText(), config)
    rng = random.Random(0)
    for row in range(ROWS + 4):
        prompt = [rng.randrange(3, 700) for _ in range(rng.randint(1, 200))]
        params = SamplingParams(max_tokens=3 + row, temperature=0.7 * (row % 2), ignore_eos=True)
        engine.add(Request(row, 0, prompt, params, stream=row))
    while engine.has_unfinished():
        engine.step()
    print(json.dumps(Counter(name for name, _ in variants)))


if __name__ == "__main__":
    main()
