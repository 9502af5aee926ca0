"""A token that the model makes no finite numbers of spoils every row that reads it, and no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, build

from batchjob.engine import Engine, EngineConfig
from batchjob.engine.kv_cache import KVCache, LayerShape
from batchjob.engine.runner import TorchRunner
from batchjob.engine.steps.nonfinite import NonfiniteBlocks
from batchjob.records import Completion, Request
from batchjob.sampling import SamplingParams

BROKEN = 5  # not among the tokens of the check at load
SIZE = 4
CPU = torch.device("cpu")


class NoText:
    special_tokens = ()

    def decode(self, ids: list[int]) -> str:
        return ""


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose token 5 is not a number."""
    model = build(*FAMILIES["llama"])
    model.get_input_embeddings().weight.data[BROKEN] = torch.nan
    path = tmp_path_factory.mktemp("models") / "llama"
    model.save_pretrained(path)
    return path


def run(path: Path, prompts: list[list[int]], **settings: Any) -> list[Completion]:
    config = EngineConfig(**{"max_model_len": 64, "max_num_seqs": 4, "block_size": SIZE, **settings})
    engine = Engine(TorchRunner(path, config), NoText(), config)
    params = SamplingParams(max_tokens=6, logit_bias=((BROKEN, -100.0),))  # it must not come up by itself
    for row, prompt in enumerate(prompts):
        engine.add(Request(row, 0, prompt, params, stream=row))
    done: dict[int, Completion] = {}
    while engine.has_unfinished():
        done.update({completion.row_index: completion for completion in engine.step()})
    return [done[row] for row in range(len(prompts))]


CLEAN = [4, 9, 6, 7, 8, 11, 12, 13, 14, 15]
SPOILT = [4, BROKEN, 6, 7, 8, 11, 12, 13, 14, 15]  # in the first block
WAYS: list[dict[str, Any]] = [
    {},
    {"max_num_batched_tokens": 4},
    {"attention_backend": "reference"},
    {"attention_backend": "reference", "max_num_batched_tokens": 4},
    {"async_scheduling": True},
    {"async_scheduling": True, "decode_steps_per_launch": 3, "max_num_batched_tokens": 5},
    {"deterministic": True, "max_num_batched_tokens": 4},
]


@pytest.mark.parametrize("settings", WAYS, ids=str)
def test_a_row_that_reads_a_broken_token_is_an_error(settings: dict[str, Any], model_path: Path) -> None:
    """In one part or several, and also behind the prefix cache, where others have computed it."""
    prompts = [SPOILT, CLEAN, [*SPOILT, 20, 21], [*SPOILT[:8], 33], CLEAN[:3]]
    done = run(model_path, prompts, **settings)
    assert [completion.error is None for completion in done] == [False, True, False, False, True]
    error = done[2].error
    assert error is not None
    assert (error.type, "not finite" in error.message) == ("engine_error", True)


@pytest.mark.parametrize("settings", WAYS[:1] + WAYS[4:6], ids=str)
def test_blocks_are_clean_for_their_next_owners(settings: dict[str, Any], model_path: Path) -> None:
    """A cache so small that the rows after a broken one get its blocks, for prompts and for what they decode."""
    per_block = 2 * 3 * 2 * 8 * 4 * SIZE
    prompts = [SPOILT, *([row + 60, *CLEAN] for row in range(12))]
    done = run(model_path, prompts, kv_cache_bytes=9 * per_block, max_num_seqs=2, **settings)
    assert [completion.error is None for completion in done] == [False] + [True] * 12
    assert [completion.token_ids for completion in done[1:]] == [
        completion.token_ids for completion in run(model_path, prompts[1:])
    ]


def test_flags_follow_blocks() -> None:
    cache = KVCache([LayerShape(1, 8)], num_blocks=5, block_size=SIZE, dtype=torch.float32, device=CPU)
    blocks = NonfiniteBlocks(cache)
    table = torch.tensor([[0, 1, 2], [3, 4, 5]])

    def write(slots: list[int], broken: list[bool]) -> None:
        blocks.begin(torch.tensor(slots))
        blocks.note(torch.tensor(slots), torch.tensor(broken))

    def read(*kv_lens: int) -> list[bool]:
        return blocks.read_by(table, torch.tensor(kv_lens)).tolist()

    write([0, 1, 2, 3, 4, 5], [False, False, False, False, True, False])
    assert read(4, 9) == [False, False]
    assert read(5, 9) == [True, False]
    write([6, 7, 12], [False] * 3)  # the rest of block 1, and block 3 again
    assert read(8, 1) == [True, False]
    write([4, 5, 6], [False] * 3)  # block 1 again
    assert read(8, 1) == [False, False]
