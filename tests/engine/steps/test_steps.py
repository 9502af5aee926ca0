"""State on the device, steps started ahead and several decode steps at once give the tokens of one step at a time."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, save

from batchjob.engine import Engine, EngineConfig
from batchjob.engine.kv_cache import KVCache, LayerShape
from batchjob.engine.runner import TorchRunner
from batchjob.engine.steps.state import DeviceState
from batchjob.records import Completion, Request
from batchjob.sampling import SamplingParams

WAYS: list[dict[str, Any]] = [
    {"async_scheduling": True},
    {"decode_steps_per_launch": 4},
    {"async_scheduling": True, "decode_steps_per_launch": 3},
]
BLOCK_SIZE = 4


class Letters:
    special_tokens = ()

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(32 + token) for token in ids)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("models") / "llama", *FAMILIES["llama"])


def make_requests(number: int = 24) -> list[Request]:
    rng = random.Random(0)
    settings = [
        SamplingParams(max_tokens=9),
        SamplingParams(max_tokens=17, ignore_eos=True),
        SamplingParams(max_tokens=20, temperature=1.0),
        SamplingParams(max_tokens=20, temperature=0.8, top_k=20, top_p=0.9),
        SamplingParams(max_tokens=20, temperature=1.3, min_p=0.02, repetition_penalty=1.2, presence_penalty=0.3),
        SamplingParams(max_tokens=20, temperature=1.0, stop_token_ids=(11, 40), min_tokens=5),
        SamplingParams(max_tokens=12, logit_bias=((7, 4.0), (9, -100.0))),
    ]
    stop = SamplingParams(max_tokens=20, temperature=1.0, stop=("A", "~z"))
    shared = [rng.randrange(3, 96) for _ in range(13)]
    requests = []
    for row in range(number):
        own = [rng.randrange(3, 96) for _ in range(rng.randint(1, 20))]
        prompt = shared + own if row % 3 == 0 else own
        params = stop if row == 5 else settings[row % len(settings)]
        requests.append(Request(row, 0, prompt, params, stream=1000 + row))
    return requests


def run(path: Path, number: int = 24, **settings: Any) -> tuple[dict[int, Completion], Engine]:
    config = EngineConfig(
        **{
            "max_model_len": 64,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 24,
            "block_size": BLOCK_SIZE,
            "eos_token_ids": (2,),
            **settings,
        }
    )
    engine = Engine(TorchRunner(path, config), Letters(), config)
    for request in make_requests(number):
        assert engine.add(request) is None
    done = {}
    while engine.has_unfinished():
        done.update({completion.row_index: completion for completion in engine.step()})
    engine.close()
    return done, engine


@pytest.fixture(scope="module")
def expected(model_path: Path) -> dict[int, Completion]:
    return run(model_path)[0]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: ",".join(way))
def test_rows_are_the_same(way: dict[str, Any], model_path: Path, expected: dict[int, Completion]) -> None:
    actual, engine = run(model_path, **way)
    assert actual == expected
    assert engine.stats.num_wasted > 0


@pytest.mark.parametrize("way", WAYS, ids=lambda way: ",".join(way))
def test_rows_are_the_same_in_a_small_cache(
    way: dict[str, Any], model_path: Path, expected: dict[int, Completion]
) -> None:
    per_block = 2 * 3 * 2 * 8 * 4 * BLOCK_SIZE
    actual, engine = run(model_path, kv_cache_bytes=26 * per_block, **way)
    assert actual == expected
    assert engine.stats.num_preemptions > 0


def test_rows_are_the_same_with_another_backend(model_path: Path, expected: dict[int, Completion]) -> None:
    actual, _ = run(model_path, attention_backend="reference", async_scheduling=True, decode_steps_per_launch=2)
    assert actual == expected


@pytest.mark.parametrize("number", [2, pytest.param(24, marks=pytest.mark.long)])
def test_rows_are_the_same_with_triton(number: int, model_path: Path, expected: dict[int, Completion]) -> None:
    """In its interpreter, which is slow: lengths and block tables are then read on the device."""
    pytest.importorskip("triton")
    ahead = {"async_scheduling": True, "decode_steps_per_launch": 2}
    actual, _ = run(model_path, number, attention_backend="triton", **ahead)
    assert actual == {row: expected[row] for row in range(number)}


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt_oss", "qwen3_moe"])
def test_other_families(family: str, tmp_path: Path) -> None:
    path = save(tmp_path / family, *FAMILIES[family])
    expected, _ = run(path)
    assert run(path, async_scheduling=True, decode_steps_per_launch=4)[0] == expected


def test_shared_prefixes_are_read_once(
    model_path: Path, expected: dict[int, Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    from batchjob.engine import runner
    from batchjob.engine.steps.inputs import InputBuilder

    monkeypatch.setattr(runner, "MIN_TOKENS_SAVED", 2 * BLOCK_SIZE)
    seen = []
    original = InputBuilder.build

    def build(self: InputBuilder, plan: Any) -> Any:
        inputs = original(self, plan)
        seen.append(bool(inputs.contexts))
        return inputs

    monkeypatch.setattr(InputBuilder, "build", build)
    assert run(model_path, async_scheduling=True)[0] == expected
    assert any(seen)


def test_a_decode_step_of_the_same_rows_sends_their_new_blocks_only(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = []
    original = DeviceState.receive

    def receive(self: DeviceState, inputs: Any) -> Any:
        sent.append((inputs.is_decode, len(inputs.data)))
        return original(self, inputs)

    monkeypatch.setattr(DeviceState, "receive", receive)
    config = EngineConfig(max_model_len=64, max_num_seqs=4, block_size=BLOCK_SIZE, async_scheduling=True)
    engine = Engine(TorchRunner(model_path, config), Letters(), config)
    for row in range(3):
        engine.add(Request(row, 0, [5, 6, 7, 8 + row], SamplingParams(max_tokens=13), stream=row))
    while engine.has_unfinished():
        engine.step()
    decodes = [size for is_decode, size in sent if is_decode]
    assert decodes == [2 * 3 + 6, 0, 0, 0, 6, 0, 0, 0, 6, 0, 0, 0]


@pytest.mark.parametrize("way", [{}, *WAYS], ids=lambda way: ",".join(way))
def test_a_row_without_finite_logits_fails_alone(way: dict[str, Any], model_path: Path) -> None:
    """Its token of -1 is in flight when the next step starts, and must reach no embedding."""
    config = EngineConfig(max_model_len=64, max_num_seqs=4, block_size=BLOCK_SIZE, eos_token_ids=(2,), **way)
    runner = TorchRunner(model_path, config)
    with torch.no_grad():
        runner._model.module.get_input_embeddings().weight[50] = float("nan")
    engine = Engine(runner, Letters(), config)
    params = SamplingParams(max_tokens=9, ignore_eos=True, logit_bias=((50, -100.0),))
    prompts = [[5, 6, 7], [8, 50], [9], [10, 11, 12, 13, 14]]
    for row, prompt in enumerate(prompts):
        engine.add(Request(row, 0, prompt, params, stream=row))
    done: dict[int, Completion] = {}
    while engine.has_unfinished():
        done.update({completion.row_index: completion for completion in engine.step()})
    failed = done.pop(1)
    assert failed.error is not None
    assert failed.error.type == "engine_error"
    assert failed.token_ids == []
    assert all(completion.error is None and len(completion.token_ids) == 9 for completion in done.values())


def test_the_dummy_slot_stays_as_it_is_however_often_it_is_used() -> None:
    cpu = torch.device("cpu")
    cache = KVCache([LayerShape(1, 8)], num_blocks=9, block_size=4, dtype=torch.float32, device=cpu)
    state = DeviceState(cache, max_num_seqs=2, max_blocks_per_seq=2)
    slots = torch.tensor([state.dummy, 1, state.dummy])
    for _ in range(5):
        kv_lens = state.kv_lens[slots]
        assert kv_lens[0] == kv_lens[2] == 1
        state.advance(slots, torch.tensor([5, 6, -1]), kv_lens)
        assert state.slot_mapping(slots, kv_lens.long() - 1)[[0, 2]].tolist() == [9 * 4, 9 * 4]
    assert state.kv_lens.tolist() == [1, 6, 1]
    assert state.last_tokens[1] == 6
    assert state.last_tokens[state.dummy] >= 0
