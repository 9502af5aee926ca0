"""The engine's greedy output is Transformers' `generate`, token by token, on a real model in float32.

Reference: `model.generate` row by row. A difference is allowed only at a near-tie (the two logits within 1e-3) and for
at most 1 % of rows; the rest of such a row is then checked by teacher forcing through the reference model.
The short form runs a few rows; the long form (`-m long`) all 64 prompts with 128 tokens over every setting.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

NEAR_TIE = 1e-3
DATA = Path(__file__).parents[2] / "data" / "gsm8k_64.jsonl"


class Setting(NamedTuple):
    name: str
    block_size: int = 16
    max_num_batched_tokens: int = 512
    prefix_caching: bool = True
    small_pool: bool = False
    reverse: bool = False


SETTINGS = (
    Setting("block-16"),
    Setting("block-32", block_size=32),
    Setting("budget-32", max_num_batched_tokens=32),
    Setting("block-32-budget-32", block_size=32, max_num_batched_tokens=32),
    Setting("no-prefix-caching", prefix_caching=False),
    Setting("small-pool", small_pool=True),
    Setting("small-pool-no-prefix-caching", small_pool=True, prefix_caching=False),
    Setting("reversed", reverse=True),
)
# What each setting does is in one of these too; the long form has them one by one.
FEW = [setting for setting in SETTINGS if setting.name not in ("block-32", "budget-32", "no-prefix-caching")]


class Reference:
    """The model, its chat-templated prompts and its own greedy continuation of each."""

    def __init__(self, path: Path, num_rows: int, max_tokens: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.path = path
        self.max_tokens = max_tokens
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        questions = [json.loads(line)["question"] for line in DATA.read_text().splitlines()[:num_rows]]
        self.prompts = [
            self.tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
            )
            for question in questions
        ]
        self.outputs = [self._generate(prompt) for prompt in self.prompts]

    def _generate(self, prompt: list[int]) -> list[int]:
        import torch

        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=self.max_tokens, do_sample=False
            )
        return list(map(int, out[0, len(prompt) :]))

    def logits(self, prompt: list[int], output: list[int]) -> Any:
        """Logits [len(output), vocab] that chose each output token, by one forward over prompt and output."""
        import torch

        with torch.inference_mode():
            return self.model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]


def near_ties(reference: Reference, outputs: list[list[int]]) -> int:
    """Checks every row and returns how many differ, each only from a near-tie on."""
    differing = 0
    for prompt, expected, actual in zip(reference.prompts, reference.outputs, outputs, strict=True):
        if actual == expected:
            continue
        differing += 1
        first = next(i for i, pair in enumerate(zip(expected, actual, strict=False)) if pair[0] != pair[1])
        logits = reference.logits(prompt, actual)
        gap = abs(float(logits[first, expected[first]] - logits[first, actual[first]]))
        assert gap <= NEAR_TIE, f"token {first} differs with logits {gap} apart"
        chosen = logits.gather(1, logits.new_tensor(actual).long()[:, None])[:, 0]
        worst = float((logits.max(dim=1).values - chosen).max())
        assert worst <= NEAR_TIE, f"after its near-tie the row leaves the reference by {worst}"
    return differing


def run_engine(reference: Reference, setting: Setting) -> tuple[list[list[int]], int]:
    """Output token ids per row, and how many rows were preempted at least once."""
    from batchjob.engine import Engine
    from batchjob.engine.config import EngineConfig
    from batchjob.engine.runner import TorchRunner
    from batchjob.records import Request
    from batchjob.sampling import SamplingParams

    config = reference.model.config
    bytes_per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    num_rows = len(reference.prompts)
    # The small pool holds every prompt and one more block for each row, but not what all of them come to.
    prompt_blocks = sum(-(-len(prompt) // setting.block_size) for prompt in reference.prompts)
    num_blocks = prompt_blocks + num_rows + 1
    if not setting.small_pool:
        num_blocks += num_rows * (reference.max_tokens // setting.block_size + 1)
    engine_config = EngineConfig(
        max_model_len=2048,
        max_num_seqs=num_rows,
        max_num_batched_tokens=max(setting.max_num_batched_tokens, 32),
        block_size=setting.block_size,
        kv_cache_bytes=num_blocks * setting.block_size * bytes_per_token,
        prefix_caching=setting.prefix_caching,
        eos_token_ids=(2,),
    )
    engine = Engine(TorchRunner(str(reference.path), engine_config), reference.tokenizer, engine_config)
    order = list(range(num_rows))
    params = SamplingParams(max_tokens=reference.max_tokens)
    for row in reversed(order) if setting.reverse else order:
        assert engine.add(Request(row, 0, reference.prompts[row], params, stream=row)) is None
    outputs: dict[int, list[int]] = {}
    while engine.has_unfinished():
        for completion in engine.step():
            assert completion.error is None
            outputs[completion.row_index] = completion.token_ids
    preempted = engine.stats.num_preempted
    engine.close()
    return [outputs[row] for row in order], preempted


@pytest.fixture(scope="module")
def short_reference(smollm2: Path) -> Reference:
    return Reference(smollm2, num_rows=6, max_tokens=40)


@pytest.fixture(scope="module")
def full_reference(smollm2: Path) -> Reference:
    return Reference(smollm2, num_rows=64, max_tokens=128)


@pytest.mark.parametrize("setting", FEW, ids=lambda setting: setting.name)
def test_a_few_rows_equal_generate(short_reference: Reference, setting: Setting) -> None:
    outputs, preempted = run_engine(short_reference, setting)
    assert near_ties(short_reference, outputs) == 0
    assert not setting.small_pool or preempted >= 1


@pytest.mark.long
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_64_rows_equal_generate(full_reference: Reference, setting: Setting) -> None:
    outputs, preempted = run_engine(full_reference, setting)
    differing = near_ties(full_reference, outputs)
    print(f"{setting.name}: {differing} of 64 rows differ at a near-tie, {preempted} rows preempted")
    assert differing <= len(outputs) // 100
    assert not setting.small_pool or preempted >= 10
