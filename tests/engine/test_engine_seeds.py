"""Seeds through the whole engine with a real forward pass: a seed is a promise about one row, whatever runs beside it.

In float32 on a CPU, so that the logits of a row differ between batches by rounding only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from batchjob.engine import Engine, EngineConfig
from batchjob.records import Request, stream_key
from batchjob.sampling import SamplingParams

PROMPTS = [[1, 70 + row, 80, 90, 100 + row, 110] for row in range(9)]
SEED = 42
EXPECTED_TOKENS = 16


class Ids:
    special_tokens = ()

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


@pytest.fixture
def generate(tiny_llama: Path) -> Any:
    from batchjob.engine.runner import TorchRunner

    torch.set_num_threads(1)

    def run(rows: list[tuple[int, int | None]], *, n: int = 1, **settings: Any) -> dict[tuple[int, int], list[int]]:
        """Rows are (which prompt, seed); the result is by (place in the list, sample)."""
        settings = {"block_size": 4, "max_num_seqs": 16, "max_num_batched_tokens": 64} | settings
        config = EngineConfig(max_model_len=64, kv_cache_bytes=settings.pop("kv_cache_bytes", 1 << 20), **settings)
        engine = Engine(TorchRunner(tiny_llama, config), Ids(), config)
        for index, (prompt, seed) in enumerate(rows):
            params = SamplingParams(temperature=0.9, max_tokens=EXPECTED_TOKENS, ignore_eos=True, seed=seed, n=n)
            for sample in range(n):
                stream = stream_key(row_seed=seed, job_seed=0, row_index=index, sample_index=sample)
                assert engine.add(Request(index, sample, PROMPTS[prompt], params, stream)) is None
        done = {}
        while engine.has_unfinished():
            for completion in engine.step():
                done[completion.row_index, completion.sample_index] = completion.token_ids
        run.num_preemptions = engine.stats.num_preemptions  # type: ignore[attr-defined]
        engine.close()
        return done

    return run


def test_a_seeded_row_is_the_same_alone_beside_others_and_last_of_many(generate: Any) -> None:
    alone = generate([(0, SEED)])[0, 0]
    assert len(alone) == EXPECTED_TOKENS
    assert generate([(0, SEED), (1, None)])[0, 0] == alone
    many = generate([*[(row, row if row % 2 else None) for row in range(1, 8)], (0, SEED), (0, SEED)])
    assert many[7, 0] == many[8, 0] == alone


def test_rows_without_a_seed_draw_from_streams_of_their_own(generate: Any) -> None:
    done = generate([(0, SEED), (0, None), (0, None)])
    assert len({tuple(tokens) for tokens in done.values()}) == 3


def test_settings_of_the_engine_change_no_sample(generate: Any) -> None:
    rows = [(row, SEED if row % 3 else None) for row in range(9)]
    expected = generate(rows, n=2)
    assert generate(rows, n=2, max_num_seqs=1, max_num_batched_tokens=3) == expected
    assert generate(rows, n=2, prefix_caching=False, block_size=16) == expected
    bytes_per_token = 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, head size, float32
    assert generate(rows, n=2, kv_cache_bytes=48 * bytes_per_token) == expected
    assert generate.num_preemptions > 0


def test_samples_of_a_row_differ(generate: Any) -> None:
    done = generate([(0, SEED)], n=5)
    assert len({tuple(tokens) for tokens in done.values()}) == 5
