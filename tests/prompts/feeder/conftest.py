"""Plans and feeder configurations over small inputs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from batchjob.inputs.planner import make_plan
from batchjob.prompts import PromptConfig, resolve_prompt
from batchjob.prompts.feeder import FeederConfig, PromptFeeder
from batchjob.records import Prompt
from batchjob.sampling import SamplingParams
from batchjob.spec import JobSpec


@pytest.fixture
def config_of() -> Callable[..., FeederConfig]:
    """`config_of(path, chunk_rows=..., max_model_len=..., tokenizer=...)` with the fake tokenizer by default."""

    def config_of(path: Path, *, tokenizer: str = "fake", max_model_len: int = 1000, **options: Any) -> FeederConfig:
        spec = JobSpec(input=(str(path),), **options)
        result = make_plan(spec)
        prompt = PromptConfig(
            source=resolve_prompt(spec, result.columns),
            sampling=SamplingParams(),
            max_model_len=max_model_len,
            vocab_size=65_536,
            chat=spec.chat,
            system=spec.system,
        )
        return FeederConfig(result.plan, prompt, tokenizer, spec.max_row_bytes)

    return config_of


@pytest.fixture
def drain() -> Callable[..., list[Prompt]]:
    """Feeds every chunk (rows in `skip` left out) and returns all prompts; checks the order of chunks."""

    def drain(feeder: PromptFeeder, config: FeederConfig, skip: Iterable[int] = ()) -> list[Prompt]:
        skip = frozenset(skip)
        for chunk in config.plan.chunks:
            feeder.feed(chunk, [row for row in skip if chunk.row_index <= row < chunk.row_index + chunk.num_rows])
        prompts: list[Prompt] = []
        finished: list[int] = []
        deadline = time.monotonic() + 60
        while len(finished) < len(config.plan.chunks):
            assert time.monotonic() < deadline
            for batch in feeder.poll(0.5):
                assert batch.chunk_index == len(finished)
                prompts += batch.prompts
                if batch.last:
                    finished.append(batch.chunk_index)
        assert feeder.poll() == []
        return prompts

    return drain
