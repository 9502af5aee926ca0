"""Rows to prompts with the fake tokenizer: empty and wrong prompts, limits, per-row settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from batchjob.prompts import PromptBuilder
from batchjob.records import Prompt, Record, RowError
from batchjob.sampling import SamplingParams

Builder = Callable[..., PromptBuilder]
MakeRecord = Callable[..., Record]


def failure(prompt: Prompt) -> RowError:
    assert prompt.error is not None
    assert prompt.token_ids == []
    return prompt.error


def test_empty_blank_null_and_missing_prompts(builder: Builder, record: MakeRecord) -> None:
    make = builder(["id", "prompt"])
    texts: list[Any] = ["Name a river.", "", "  ", "\n", None]
    records = [record(i, id=f"r{i}", prompt=text) for i, text in enumerate(texts)]
    records += [record(5, id="r5"), record(6, id="r6", prompt="Count.")]
    prompts = make.build_many(records)
    assert [p.row_index for p in prompts] == list(range(7))
    assert prompts == [make.build(r) for r in records]  # a row does not depend on its neighbours
    assert prompts[1].token_ids == [1]  # the start token alone: a prompt
    assert len({tuple(p.token_ids) for p in prompts[1:4]}) == 3  # blanks are text
    for prompt in prompts[4:6]:
        error = failure(prompt)
        assert error.type == "invalid_prompt"
        assert "'prompt'" in error.message
        assert f"rows.jsonl:{prompt.row_index + 1} (id r{prompt.row_index})" in error.message


@pytest.mark.parametrize("value", [7, 1.5, True, ["x"], {"a": 1}, b"raw"])
def test_a_prompt_column_must_hold_text(builder: Builder, record: MakeRecord, value: Any) -> None:
    assert failure(builder(["prompt"]).build(record(prompt=value))).type == "invalid_prompt"


def test_a_row_that_could_not_be_read_keeps_its_error(builder: Builder) -> None:
    error = RowError("invalid_json", "rows.jsonl:1: not JSON")
    assert failure(builder(["prompt"]).build(Record(0, {}, "rows.jsonl:1", error))) is error


# -- templates over columns


def text_of(make: PromptBuilder, record: Record) -> str | None:
    return make.prompt_text(record)


def test_a_template_takes_values_of_any_type(builder: Builder, record: MakeRecord) -> None:
    make = builder(["a", "b", "c"], prompt="{{{a}}} {b}/{c}")
    row = record(a="x {b}", b=7, c=[1, "\u00e9", None])
    assert text_of(make, row) == '{x {b}} 7/[1, "\u00e9", null]'
    assert text_of(make, record(a=2.5, b=True, c={"k": 1})) == '{2.5} true/{"k": 1}'
    assert text_of(make, record(a="", b=float("inf"), c=[float("-inf")])) == '{} Infinity/["-Infinity"]'


@pytest.mark.parametrize("fields", [{"a": "x"}, {"a": "x", "b": None}, {"a": "x", "b": b"raw"}])
def test_a_template_needs_every_column_in_every_row(
    builder: Builder, record: MakeRecord, fields: dict[str, Any]
) -> None:
    error = failure(builder(["a", "b"], prompt="{a} {b}").build(record(**fields)))
    assert error.type == "invalid_prompt"
    assert "'b'" in error.message


# -- one column or another


def test_each_row_may_use_another_default_column(builder: Builder, record: MakeRecord) -> None:
    make = builder(["prompt", "messages", "prompt_token_ids"])
    assert make.build(record(prompt="hello")).token_ids[0] == 1
    assert make.build(record(prompt=None, prompt_token_ids=[5, 6])).token_ids == [5, 6]
    chat = make.build(record(messages=[{"role": "user", "content": "hello"}]))
    assert len(chat.token_ids) == 4
    assert "null or absent" in failure(make.build(record())).message
    assert "both given" in failure(make.build(record(prompt="x", prompt_token_ids=[5]))).message


# -- token ids


def test_token_ids_are_sent_as_they_are(builder: Builder, record: MakeRecord) -> None:
    make = builder(["prompt_token_ids"], vocab_size=50)
    assert make.build(record(prompt_token_ids=[1, 1, 49, 0])).token_ids == [1, 1, 49, 0]


@pytest.mark.parametrize("value", [None, [], "5 6", [5, "6"], [5, 6.0], [True], [-1], [50], {"a": 1}])
def test_token_ids_that_cannot_be(builder: Builder, record: MakeRecord, value: Any) -> None:
    error = failure(builder(["prompt_token_ids"], vocab_size=50).build(record(prompt_token_ids=value)))
    assert error.type == "invalid_prompt"


# -- length


def ids(length: int) -> list[int]:
    return [5 + i * 7 % 40 for i in range(length)]


def test_lengths_at_the_edge_of_the_limit_are_judged_row_by_row(builder: Builder, record: MakeRecord) -> None:
    make = builder(["prompt_token_ids"], max_model_len=32)
    lengths = [8, 28, 29, 31, 32, 33, 40]
    records = [record(i, prompt_token_ids=ids(length)) for i, length in enumerate(lengths)]
    forward = make.build_many(records)
    backward = make.build_many(records[::-1])[::-1]
    assert forward == backward
    for length, prompt in zip(lengths, forward, strict=True):
        if length < 32:  # at least one token of output fits
            assert prompt.token_ids == ids(length)
        else:
            error = failure(prompt)
            assert error.type == "prompt_too_long"
            assert f"{length} tokens" in error.message
            assert "32" in error.message


def test_one_row_far_too_long_costs_its_neighbours_nothing(builder: Builder, record: MakeRecord) -> None:
    make = builder(["prompt"], max_model_len=100)
    before, long, after = make.build_many(
        [record(0, prompt="short one"), record(1, prompt="word " * 9000), record(2, prompt="short two")]
    )
    assert len(before.token_ids) == len(after.token_ids) == 3
    assert "9,002 tokens" in failure(long).message
    assert "max_model_len is 100" in failure(long).message


@pytest.mark.parametrize(
    ("policy", "max_tokens", "expected"),
    [
        ("truncate-right", 10, list(range(1, 91))),
        ("truncate-left", 10, [1, *range(112, 201)]),
        ("truncate-right", None, list(range(1, 89))),  # an eighth of the limit is left
        ("truncate-right", 5000, list(range(1, 51))),  # never more than half
    ],
)
def test_truncation_leaves_room_for_the_output_and_keeps_the_start_token(
    builder: Builder, record: MakeRecord, policy: str, max_tokens: int | None, expected: list[int]
) -> None:
    sampling = SamplingParams(max_tokens=max_tokens)
    make = builder(["prompt_token_ids"], max_model_len=100, length_policy=policy, sampling=sampling)
    assert make.build(record(prompt_token_ids=list(range(1, 201)))).token_ids == expected
    short = list(range(1, 40))
    assert make.build(record(prompt_token_ids=short)).token_ids == short


def test_truncation_without_a_start_token_cuts_the_start(builder: Builder, record: MakeRecord) -> None:
    make = builder(["prompt_token_ids"], max_model_len=8, length_policy="truncate-left")
    assert make.build(record(prompt_token_ids=list(range(5, 25)))).token_ids == list(range(18, 25))


def test_truncation_looks_at_the_rows_own_max_tokens(builder: Builder, record: MakeRecord) -> None:
    make = builder(["prompt_token_ids", "params"], max_model_len=100, length_policy="truncate-right")
    prompt = make.build(record(prompt_token_ids=list(range(200)), params={"max_tokens": 40}))
    assert len(prompt.token_ids) == 60


# -- settings of a row


@pytest.mark.parametrize(
    "value",
    [
        {"temperature": 0.5, "seed": 3, "stop": ["x"]},
        '{"temperature": 0.5, "seed": 3, "stop": "x"}',
        {"temperature": 0.5, "seed": 3, "stop": ["x"], "top_k": None},  # a Parquet struct has every field
        [{"key": "seed", "value": 3}, {"key": "temperature", "value": 0.5}, {"key": "stop", "value": "x"}],  # a map
    ],
)
def test_params_of_a_row_go_on_top_of_the_jobs(builder: Builder, record: MakeRecord, value: Any) -> None:
    make = builder(["prompt", "params"], sampling=SamplingParams(max_tokens=9, top_k=4))
    prompt = make.build(record(prompt="x", params=value))
    assert prompt.params == SamplingParams(max_tokens=9, top_k=4, temperature=0.5, seed=3, stop=("x",))


@pytest.mark.parametrize("value", [None, {}, "null", "{}", {"top_k": 4}, {"top_k": None}])
def test_params_that_change_nothing_are_none(builder: Builder, record: MakeRecord, value: Any) -> None:
    make = builder(["prompt", "params"], sampling=SamplingParams(top_k=4))
    prompt = make.build(record(prompt="x", params=value))
    assert (prompt.params, prompt.error) == (None, None)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"temprature": 1}, "unknown sampling parameter 'temprature'"),
        ({"logprobs": 3}, "logprobs"),
        ({"temperature": "hot"}, "finite number"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 9, "max_tokens": 3}, "above max_tokens"),
        ({"stop_token_ids": [65_536]}, "65536"),
        ({"logit_bias": {"70000": 1.0}}, "70000"),
        ({"seed": float("inf")}, "'params'"),
        ({"max_tokens": float("nan")}, "'params'"),
        ("not json", "not JSON"),
        ([1, 2], "object"),
        (5, "object"),
    ],
)
def test_params_that_cannot_be_are_row_errors(builder: Builder, record: MakeRecord, value: Any, words: str) -> None:
    make = builder(["prompt", "params"])
    for _ in range(2):  # a remembered error is an error
        error = failure(make.build(record(prompt="x", params=value)))
        assert error.type == "invalid_params"
        assert words in error.message
        assert "rows.jsonl:1" in error.message


def test_an_error_of_the_prompt_keeps_the_rows_settings(builder: Builder, record: MakeRecord) -> None:
    prompt = builder(["prompt", "params"]).build(record(prompt=None, params={"n": 3}))
    assert failure(prompt).type == "invalid_prompt"
    assert prompt.params is not None
    assert prompt.params.n == 3


def test_an_id_in_a_message_is_short_and_printable(builder: Builder, record: MakeRecord) -> None:
    error = failure(builder(["id", "prompt"]).build(record(id="\x1b[31m\n" + "x" * 500, prompt=None)))
    assert error.message.isprintable()
    assert len(error.message) < 200
