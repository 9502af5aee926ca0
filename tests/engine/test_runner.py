"""The runner by itself: capacity, broken rows, steps without a sample, reuse of slots and blocks."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, build

from batchjob.core.sequence import Sequence
from batchjob.core.step_plan import Slice, StepPlan
from batchjob.engine.config import EngineConfig
from batchjob.engine.memory import with_second_try
from batchjob.engine.runner import TorchRunner, _prepare_device
from batchjob.engine.sampling.slot_params import Need
from batchjob.errors import EngineError
from batchjob.records import Request
from batchjob.sampling import SamplingParams

BLOCK_SIZE = 4


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose token 5 is not a number."""
    model = build(*FAMILIES["llama"])
    model.get_input_embeddings().weight.data[5] = torch.nan
    path = tmp_path_factory.mktemp("models") / "llama"
    model.save_pretrained(path)
    return path


@pytest.fixture
def runner(model_path: Path) -> TorchRunner:
    return TorchRunner(model_path, EngineConfig(max_model_len=64, max_num_seqs=4, block_size=BLOCK_SIZE))


def sequence(tokens: list[int], slot: int, blocks: list[int]) -> Sequence:
    seq = Sequence(Request(0, 0, tokens, SamplingParams(), stream=0), max_len=60)
    seq.slot, seq.blocks = slot, blocks
    return seq


def step(runner: TorchRunner, *slices: tuple[Sequence, int, int]) -> list[int]:
    sampling = [index for index, (seq, _, stop) in enumerate(slices) if stop == len(seq.tokens)]
    [tokens] = runner.execute(StepPlan([], [Slice(*slice_) for slice_ in slices], sampling=sampling)).result().tokens
    sampled = [slices[index][0] for index in sampling]
    for seq, token in zip(sampled, tokens, strict=True):
        seq.tokens.append(token)
    return tokens


def alone(runner: TorchRunner, prompt: list[int], num_output: int) -> list[int]:
    seq = sequence(prompt, 3, [12, 13, 14, 15])
    step(runner, (seq, 0, len(prompt)))
    while len(seq.tokens) < len(prompt) + num_output:
        step(runner, (seq, len(seq.tokens) - 1, len(seq.tokens)))
    return seq.output_token_ids


def test_capacity_comes_from_the_memory_and_the_settings(model_path: Path) -> None:
    per_block = 2 * 3 * 2 * 8 * 4 * BLOCK_SIZE  # keys and values, layers, KV heads, head size, bytes, tokens
    config = EngineConfig(max_model_len=64, max_num_seqs=8, block_size=BLOCK_SIZE, kv_cache_bytes=21 * per_block)
    capacity = TorchRunner(model_path, config).capacity()
    assert (capacity.num_blocks, capacity.block_size) == (20, BLOCK_SIZE)
    assert (capacity.max_num_seqs, capacity.max_num_batched_tokens) == (8, 512)
    assert capacity.vocab_size == 96
    assert "LlamaForCausalLM in float32 on cpu, KV cache of 80 tokens" in capacity.description
    roomy = TorchRunner(model_path, EngineConfig(max_model_len=64, max_num_seqs=8, block_size=BLOCK_SIZE)).capacity()
    assert roomy.num_blocks == 8 * 16, "no more than the rows can fill"


def test_a_device_that_is_not_there_is_an_error(model_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(EngineError, match="PyTorch sees no GPU"):
        TorchRunner(model_path, EngineConfig(max_model_len=64, device="cuda"))


@pytest.mark.parametrize(("name", "index"), [("cuda", 1), ("cuda:0", 0)])
def test_a_gpu_may_be_named_without_its_number(name: str, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch._C, "_cuda_setDevice", chosen.append, raising=False)
    device = _prepare_device(EngineConfig(max_model_len=64, device=name))
    assert device == torch.device("cuda", index)
    assert chosen == [index]


def test_what_ran_out_of_memory_is_let_go_before_it_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Large:
        pass

    held: list[weakref.ref[Large]] = []
    alive: list[bool] = []

    def work() -> str:
        alive.extend(ref() is not None for ref in held)
        large = Large()
        if not held:
            held.append(weakref.ref(large))
            raise torch.OutOfMemoryError
        return "done"

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    assert with_second_try(work)() == "done"
    assert alive == [False]


def test_a_step_that_samples_nothing_gives_no_tokens(runner: TorchRunner) -> None:
    prompt = [9, 8, 7, 6, 20, 21]
    seq = sequence(list(prompt), 0, [0, 1])
    assert step(runner, (seq, 0, 4)) == []
    (token,) = step(runner, (seq, 4, 6))
    assert token == alone(runner, prompt, 1)[0]


def test_tokens_come_in_the_order_of_the_plan_whatever_the_layout(runner: TorchRunner) -> None:
    prompts = [[9] * 11, [8, 7], [30, 31, 32, 33, 34]]
    seqs = [sequence(list(prompt), slot, list(range(4 * slot, 4 * slot + 4))) for slot, prompt in enumerate(prompts)]
    step(runner, *((seq, 0, len(seq.tokens)) for seq in seqs))
    for _ in range(3):
        step(runner, *((seq, len(seq.tokens) - 1, len(seq.tokens)) for seq in seqs))
    assert [seq.output_token_ids for seq in seqs] == [alone(runner, prompt, 4) for prompt in prompts]


def test_a_row_of_broken_numbers_gives_minus_one_and_harms_no_other_now_or_later(runner: TorchRunner) -> None:
    good = [9, 8, 7, 6, 20]
    expected = alone(runner, good, 3)
    broken, beside = sequence([9, 5, 7, 8, 9], 0, [0, 1]), sequence(list(good), 1, [2, 3])
    assert step(runner, (broken, 0, 5), (beside, 0, 5)) == [-1, expected[0]]
    later = sequence(list(good), 0, [1, 0])  # on the blocks and in the slot of the broken one
    assert step(runner, (later, 0, 5), (beside, 5, 6)) == [expected[0], expected[1]]
    assert step(runner, (later, 5, 6), (beside, 6, 7)) == [expected[1], expected[2]]


def test_a_slot_follows_its_sequence_through_preemption_and_to_the_next_owner(runner: TorchRunner) -> None:
    prompt = [9, 8, 7, 6, 20]
    expected = alone(runner, prompt, 3)
    seq = sequence(list(prompt), 2, [0, 1])
    step(runner, (seq, 0, 5))
    seq.num_preemptions, seq.blocks = 1, [6, 7]  # computed again elsewhere, in the same slot
    assert step(runner, (seq, 0, 6)) == [expected[1]]
    other = sequence(list(prompt), 2, [4, 3])
    assert step(runner, (other, 0, 5)) == [expected[0]]
    assert step(runner, (other, 5, 6)) == [expected[1]]


def test_a_row_that_is_over_leaves_no_work_for_later_steps(runner: TorchRunner) -> None:
    """Filters and penalties cost the whole step; they must not outlive the row that asked for them."""
    demanding = SamplingParams(temperature=1.0, top_k=3, repetition_penalty=1.1)
    first = Sequence(Request(0, 0, [9, 8], demanding, stream=0), max_len=60)
    first.slot, first.blocks = 0, [0]
    second = sequence([7, 6], 1, [1])
    step(runner, (first, 0, 2), (second, 0, 2))
    assert runner._sampler.needs == Need.RANDOM | Need.TOP_K | Need.PENALTIES | Need.GREEDY
    step(runner, (second, 2, 3))
    assert runner._sampler.needs == Need.GREEDY


def test_closing_twice_is_fine(runner: TorchRunner) -> None:
    runner.close()
    runner.close()


def test_ids_that_stand_for_no_token_are_never_drawn(model_path: Path) -> None:
    prompt = [7, 8, 9, 10]
    config = EngineConfig(max_model_len=64, max_num_seqs=4, block_size=BLOCK_SIZE)
    drawn = alone(TorchRunner(model_path, config), prompt, 6)
    hidden = TorchRunner(model_path, replace(config, unknown_token_ids=(*drawn, 96, 1000)))
    assert not set(alone(hidden, prompt, 12)) & set(drawn)


@pytest.mark.parametrize("setting", [{"temperature": 5.0}, {"presence_penalty": 1.0, "logit_bias": ((3, 1.0),)}])
def test_nor_with_other_settings(model_path: Path, setting: dict[str, Any]) -> None:
    unknown = (5, *range(20, 96))
    config = EngineConfig(max_model_len=64, max_num_seqs=4, block_size=BLOCK_SIZE, unknown_token_ids=unknown)
    runner = TorchRunner(model_path, config)
    seq = Sequence(Request(0, 0, [7, 8, 9], SamplingParams(**setting), stream=3), max_len=60)
    seq.slot, seq.blocks = 0, list(range(15))
    step(runner, (seq, 0, 3))
    while len(seq.tokens) < 40:
        step(runner, (seq, len(seq.tokens) - 1, len(seq.tokens)))
    assert max(seq.output_token_ids) < 20
