"""What a job's settings become: sampling, sizes, stop strings that are special tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchjob.errors import UsageError
from batchjob.job.settings import resolve_settings
from batchjob.sampling import SamplingParams
from batchjob.spec import JobSpec


def test_a_seed_of_the_job_is_not_a_seed_of_each_row() -> None:
    settings = resolve_settings(JobSpec(engine="fake", seed=5))
    assert (settings.job_seed, settings.sampling.seed) == (5, None)


def test_a_stop_string_that_is_a_special_token_becomes_a_stop_token(tiny_llama: Path) -> None:
    settings = resolve_settings(JobSpec(model=str(tiny_llama), stop=("<|end|>", "word"), stop_token_ids=(9,)))
    for_rows = settings.row_sampling()
    assert for_rows.stop == ("word",)
    assert for_rows.stop_token_ids == (9, settings.special_tokens()["<|end|>"])


def test_a_token_id_beyond_the_vocabulary_is_refused_for_the_job(tiny_llama: Path) -> None:
    for given in ({"stop_token_ids": (99_999,)}, {"logit_bias": ((99_999, 1.0),)}):
        with pytest.raises(UsageError, match="99999 is not below the vocabulary size"):
            resolve_settings(JobSpec(model=str(tiny_llama), **given))  # type: ignore[arg-type]


def test_a_model_length_beyond_its_positions_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(UsageError, match="256 positions"):
        resolve_settings(JobSpec(model=str(tiny_llama), max_model_len=257))


def test_a_resume_keeps_the_dtype_that_the_job_was_made_with(tiny_llama: Path) -> None:
    frozen = {**resolve_settings(JobSpec(model=str(tiny_llama))).to_json(), "dtype": "bfloat16"}
    assert resolve_settings(JobSpec(model=str(tiny_llama)), frozen).dtype == "bfloat16"


@pytest.mark.parametrize("seed", [float("inf"), float("nan")])
def test_settings_that_are_no_numbers_are_usage_errors(seed: float) -> None:
    with pytest.raises(UsageError, match="whole number"):
        SamplingParams().override({"seed": seed})
