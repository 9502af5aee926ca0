"""Settings of single rows: what one row's value looks like has no influence on another's."""

from __future__ import annotations

from batchjob.prompts.params import RowParams
from batchjob.sampling import SamplingParams


def test_a_string_and_an_object_that_print_alike_stay_apart() -> None:
    params = RowParams("params", SamplingParams(), 100, {})
    assert isinstance(params.parse("{'top_k': 1}"), str)
    assert params.parse({"top_k": 1}) == SamplingParams(top_k=1)
    assert params.parse('{"top_k": 1}') == SamplingParams(top_k=1)


def test_a_stop_string_that_is_a_special_token_stops_by_its_id() -> None:
    params = RowParams("params", SamplingParams(), 100, {"<|end|>": 7})
    assert params.parse({"stop": ["<|end|>", "x"]}) == SamplingParams(stop=("x",), stop_token_ids=(7,))


def test_stops_of_a_row_replace_those_of_the_job_each_under_its_own_name() -> None:
    # The job's special token must neither outlive a row's own `stop` nor fall to a row's own `stop_token_ids`.
    params = RowParams("params", SamplingParams(stop=("<|end|>",), stop_token_ids=(9,)), 100, {"<|end|>": 7})
    assert params.parse({"stop": ["x"]}) == SamplingParams(stop=("x",), stop_token_ids=(9,))
    assert params.parse({"stop_token_ids": [4]}) == SamplingParams(stop_token_ids=(4, 7))
    assert params.parse({"temperature": 0.5}) == SamplingParams(stop_token_ids=(9, 7), temperature=0.5)
    assert params.parse({}) is None
    assert params.parse("null") is None


def test_the_settings_may_be_parquet_maps() -> None:
    params = RowParams("params", SamplingParams(), 1000, {})
    pairs = [{"key": "logit_bias", "value": [{"key": "7", "value": 1.0}]}, {"key": "stop_token_ids", "value": []}]
    assert params.parse(pairs) == SamplingParams(logit_bias=((7, 1.0),))
    assert params.parse([]) is None
