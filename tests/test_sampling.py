"""Sampling settings: what is refused before a logit can become infinite by it."""

from __future__ import annotations

from typing import Any

import pytest

from batchjob.errors import UsageError
from batchjob.sampling import MAX_BIAS, MAX_FACTOR, SamplingParams


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"logit_bias": {"5": 1e39}}, "logit_bias of token 5"),
        ({"logit_bias": [[5, 9e37], [5, 9e37]]}, "logit_bias of token 5"),
        ({"logit_bias": [[5, 1e308], [5, 1e308]]}, "logit_bias of token 5"),
        ({"presence_penalty": -1e31}, "presence_penalty"),
        ({"frequency_penalty": 1e39}, "frequency_penalty"),
        ({"repetition_penalty": 1e39}, "repetition_penalty"),
        ({"repetition_penalty": 1e-39}, "repetition_penalty"),
        ({"temperature": 1e39}, "temperature"),
    ],
)
def test_a_number_that_float32_cannot_work_with_is_refused_by_name(values: dict[str, Any], name: str) -> None:
    with pytest.raises(UsageError, match=name):
        SamplingParams().override(values)


def test_a_bias_that_bans_a_token_may_be_as_low_as_a_number_gets() -> None:
    assert SamplingParams().override({"logit_bias": {"5": -1e308}}).logit_bias == ((5, -1e308),)


def test_the_largest_numbers_allowed_add_up_to_finite_logits() -> None:
    torch = pytest.importorskip("torch")
    extreme = SamplingParams().override(
        {
            "logit_bias": {"1": MAX_BIAS},
            "presence_penalty": -MAX_FACTOR,
            "frequency_penalty": -MAX_FACTOR,
            "repetition_penalty": 1 / MAX_FACTOR,
        }
    )
    logit = torch.tensor(1e4, dtype=torch.float32) / extreme.repetition_penalty
    logit -= extreme.presence_penalty + extreme.frequency_penalty * 1_000_000
    assert torch.isfinite(logit + extreme.logit_bias[0][1])
