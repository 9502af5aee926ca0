"""What a job's settings become: sampling, sizes, stop strings that are special tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchjob.errors import UsageError
from batchjob.job.settings import describe_sampling, parse_memory, resolve_settings
from batchjob.sampling import SamplingParams
from batchjob.spec import JobSpec


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GiB", 2**31), ("500MB", 5 * 10**8), ("1e9", 10**9), ("1.5k", 1500), ("64 KiB", 2**16), (None, None)],
)
def test_sizes_as_people_write_them(text: str | None, size: int | None) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["", "lots", "-1GB", "2 GiBB", "0"])
def test_a_size_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="kv-cache-memory"):
        parse_memory(text)


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


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({}, "greedy, max_tokens what the context leaves"),
        ({"temperature": 0.7, "top_p": 0.9, "max_tokens": 5}, "temperature 0.7, max_tokens 5, top_p 0.9"),
    ],
)
def test_the_header_shows_what_differs_from_neutral(values: dict[str, float], text: str) -> None:
    assert describe_sampling(SamplingParams(**values)) == text  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [float("inf"), float("nan")])
def test_settings_that_are_no_numbers_are_usage_errors(seed: float) -> None:
    with pytest.raises(UsageError, match="whole number"):
        SamplingParams().override({"seed": seed})
