"""Models of many shapes, run through the runner in small parts and blocks, equal Transformers' own greedy output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, REFUSED, UNUSUAL, WINDOW, save
from transformers import AutoModelForCausalLM, GenerationConfig

from batchjob.core.blocks import BlockPool
from batchjob.core.scheduler import Scheduler
from batchjob.engine.config import EngineConfig
from batchjob.engine.runner import TorchRunner
from batchjob.errors import UnsupportedModelError
from batchjob.records import Request
from batchjob.sampling import SamplingParams

NUM_OUTPUT = 9
PROMPT_LENS = (2 * WINDOW + 3, 1, WINDOW, 31, 12)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, 96, (length,), generator=generator).tolist() for length in PROMPT_LENS]
    return [*rows, rows[3][:20] + rows[0]]  # one that shares blocks with another


def generate(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_OUTPUT, do_sample=False)
    return out[0, len(prompt) :].tolist()


def loaded(path: Path) -> Any:
    """As Transformers reads it back: it zeroes the embedding of the padding token, for one."""
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32)
    model.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=0, bos_token_id=1)
    return model


def run(path: Path, config: EngineConfig) -> list[list[int]]:
    runner = TorchRunner(path, config)
    capacity = runner.capacity()
    scheduler = Scheduler(
        BlockPool(capacity.num_blocks, capacity.block_size),
        max_num_seqs=capacity.max_num_seqs,
        max_num_batched_tokens=capacity.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        prefix_caching=config.prefix_caching,
    )
    for row, prompt in enumerate(prompts()):
        assert scheduler.add(Request(row, 0, prompt, SamplingParams(max_tokens=NUM_OUTPUT), stream=row)) is None
    outputs: dict[int, list[int]] = {}
    while (plan := scheduler.schedule()) is not None:
        scheduler.commit(plan, runner.execute(plan).result().tokens[0])
        for seq in [slice_.seq for slice_ in plan.sampled]:
            if len(seq.tokens) == seq.max_len:
                outputs[seq.request.row_index] = seq.output_token_ids
                scheduler.finish(seq)
    runner.close()
    return [outputs[row] for row in range(len(outputs))]


@pytest.mark.parametrize("family", [*FAMILIES, *UNUSUAL])
def test_equals_transformers(family: str, tmp_path: Path) -> None:
    made_of = {**FAMILIES, **UNUSUAL}[family]
    path = save(tmp_path / family, *made_of)
    expected = [generate(loaded(path), prompt) for prompt in prompts()]
    for block_size, num_tokens in ((4, 7), (16, 64)):
        config = EngineConfig(
            max_model_len=64,
            max_num_seqs=4,
            max_num_batched_tokens=num_tokens,
            block_size=block_size,
            kv_cache_bytes=1 << 20,
        )
        assert run(path, config) == expected


@pytest.mark.parametrize("family", REFUSED)
def test_a_model_that_mixes_tokens_outside_of_our_attention_is_refused_by_name(family: str, tmp_path: Path) -> None:
    path = save(tmp_path / family, *REFUSED[family])
    config_name = REFUSED[family][0].removesuffix("Config")
    with pytest.raises(UnsupportedModelError, match=f"^{config_name}ForCausalLM .*(layers|layer) "):
        TorchRunner(path, EngineConfig(max_model_len=64))
