"""The lines at the start of a run."""

from __future__ import annotations

import pytest

from batchjob.job.header import describe_sampling
from batchjob.sampling import SamplingParams


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({}, "greedy, max_tokens what the context leaves"),
        ({"temperature": 0.7, "top_p": 0.9, "max_tokens": 5}, "temperature 0.7, max_tokens 5, top_p 0.9"),
    ],
)
def test_the_header_shows_what_differs_from_neutral(values: dict[str, float], text: str) -> None:
    assert describe_sampling(SamplingParams(**values)) == text  # type: ignore[arg-type]
