"""The engine's config: where each field comes from, and that a flag reaches it by its name alone."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import pytest

from batchjob.engine.config import EngineConfig
from batchjob.spec import JobSpec, spec_fields

# Unpinned flags of the engine's section that are for the job, or that the config has under another name.
NOT_IN_CONFIG = {"devices", "order", "kv_cache_memory"}


@dataclass
class Settings:
    max_model_len: int = 77
    dtype: str = "bfloat16"
    device: str = "cuda:1"
    eos_token_ids: tuple[int, ...] = (5,)


def test_found_values_come_before_settings_and_settings_before_the_spec() -> None:
    spec = JobSpec(max_model_len=500, device="auto", max_num_seqs=3, kv_cache_memory="2GiB", num_threads=4)
    config = EngineConfig.of(spec, Settings(), unknown_token_ids=(1, 2), max_num_seqs=9)
    assert (config.max_model_len, config.dtype, config.device, config.eos_token_ids) == (77, "bfloat16", "cuda:1", (5,))
    assert (config.max_num_seqs, config.unknown_token_ids) == (9, (1, 2))
    assert (config.kv_cache_bytes, config.num_threads) == (2**31, 4)
    assert config.fuse  # neither of them has it


@pytest.mark.parametrize(("given", "expected"), [("auto", None), ("on", True), ("off", False)])
def test_a_choice_of_three(given: str, expected: bool | None) -> None:
    assert EngineConfig.of(JobSpec(async_scheduling=given), Settings()).async_scheduling is expected


def test_every_engine_flag_that_changes_only_speed_is_a_field_of_its_name() -> None:
    free = {f.name for f in spec_fields() if f.metadata["section"] == "engine" and not f.metadata["pinned"]}
    assert free - {f.name for f in fields(EngineConfig)} == NOT_IN_CONFIG


def test_a_limit_is_halved_down_to_its_floor() -> None:
    def halved(number: int, **options: Any) -> int:
        return EngineConfig(max_model_len=8, memory_backoff=2).halved(number, **options)

    assert (halved(64), halved(64, floor=32), halved(10, floor=32)) == (16, 32, 10)
