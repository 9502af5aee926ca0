"""Chats: what a row may hold, the template applied once, one start token, and templates that refuse or misbehave."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from batchjob.errors import UsageError
from batchjob.prompts import PromptBuilder
from batchjob.prompts.hf_tokenizer import HFTokenizer
from batchjob.records import Prompt, Record

Builder = Callable[..., PromptBuilder]
MakeRecord = Callable[..., Record]
HF = Callable[..., HFTokenizer]

USER = {"role": "user", "content": "Which way?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "map"}'}}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def rows(record: MakeRecord, *chats: Any) -> list[Record]:
    return [record(index, messages=chat) for index, chat in enumerate(chats)]


def why(prompt: Prompt) -> str:
    assert prompt.error is not None
    return f"{prompt.error.type}: {prompt.error.message}"


# -- one start token


@pytest.mark.parametrize("adds_bos", [True, False])
def test_a_chat_is_the_template_rendered_straight_to_ids(
    builder: Builder, record: MakeRecord, hf: HF, adds_bos: bool
) -> None:
    tokenizer = hf(adds_bos=adds_bos)
    chats = [[USER], [USER, {"role": "assistant", "content": "Left."}, {"role": "user", "content": "Sure?"}]]
    prompts = builder(["messages"], tokenizer).build_many(rows(record, *chats))
    for chat, prompt in zip(chats, prompts, strict=True):
        expected = tokenizer._tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert prompt.token_ids == expected
        assert prompt.token_ids.count(1) == 1
        assert tokenizer.decode(prompt.token_ids).endswith("[assistant]")


@pytest.mark.parametrize("adds_bos", [True, False])
def test_raw_text_gets_the_start_token_that_its_tokenizer_adds_and_never_two(
    builder: Builder, record: MakeRecord, hf: HF, adds_bos: bool
) -> None:
    tokenizer = hf(adds_bos=adds_bos)
    make = builder(["prompt"], tokenizer)
    plain, marked, doubled, empty = make.build_many(
        [record(0, prompt="Go."), record(1, prompt="<s>Go."), record(2, prompt="<s><s>Go."), record(3, prompt="")]
    )
    body = tokenizer.encode("Go.", add_special_tokens=False)
    assert plain.token_ids == ([1, *body] if adds_bos else body)
    assert marked.token_ids == [1, *body]
    assert doubled.token_ids == [1, 1, *body]  # what the row itself wrote stays
    if adds_bos:
        assert empty.token_ids == [1]
    else:
        assert why(empty).startswith("invalid_prompt")


def test_chat_wraps_text_as_one_user_turn(builder: Builder, record: MakeRecord, hf: HF) -> None:
    tokenizer = hf(CHATML)
    row = record(prompt="Which way?")
    assert builder(["prompt"], tokenizer, chat=True).prompt_text(row) == (
        "<|im_start|>user\nWhich way?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert builder(["prompt"], tokenizer, system="Be brief.").prompt_text(row) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhich way?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert builder(["prompt"], tokenizer).prompt_text(row) == "Which way?"


def test_special_tokens_inside_text_encode_as_in_transformers(builder: Builder, record: MakeRecord, hf: HF) -> None:
    tokenizer = hf(CHATML)
    text = "a<|im_end|>b"
    assert builder(["prompt"], tokenizer).build(record(prompt=text)).token_ids == tokenizer._tokenizer.encode(text)
    assert 4 in builder(["prompt"], tokenizer).build(record(prompt=text)).token_ids


def test_system_goes_first_unless_the_row_has_its_own(builder: Builder, record: MakeRecord, hf: HF) -> None:
    make = builder(["messages"], hf(CHATML), system="Job's.")
    own = [{"role": "system", "content": "Row's."}, USER]
    assert "system\nRow's." in (make.prompt_text(record(messages=own)) or "")
    assert "Job's." not in (make.prompt_text(record(messages=own)) or "")
    assert (make.prompt_text(record(messages=[USER])) or "").startswith("<|im_start|>system\nJob's.")


# -- content that is null, missing, in parts


def test_null_empty_and_missing_content_of_a_calling_turn_are_the_same(
    builder: Builder, record: MakeRecord, hf: HF
) -> None:
    after = [{"role": "tool", "tool_call_id": "c1", "content": "a hill"}, {"role": "user", "content": "So?"}]
    turns = [{"role": "assistant", "tool_calls": [CALL], **extra} for extra in ({"content": None}, {"content": ""}, {})]
    make = builder(["messages"], hf(CHATML))
    prompts = make.build_many(rows(record, *([USER, turn, *after] for turn in turns)))
    assert prompts[0].token_ids == prompts[1].token_ids == prompts[2].token_ids
    text = make.prompt_text(record(messages=[USER, turns[0], *after])) or ""
    assert "None" not in text
    assert text.count("<|im_start|>") == 5  # no turn is dropped


def test_text_parts_are_joined_in_order(builder: Builder, record: MakeRecord, hf: HF) -> None:
    parts = [{"type": "text", "text": "Which"}, {"type": "text", "text": " way?"}]
    make = builder(["messages"], hf(CHATML))
    assert make.build(record(messages=[{"role": "user", "content": parts}])) == make.build(record(messages=[USER]))


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (None, "null or absent"),
        ([], "at least one message"),
        ("just text", "not JSON"),
        ({"role": "user"}, "an object, not a list"),
        (["hi"], "message 1 is text"),
        ([{"content": "hi"}], "message 1 has no role"),
        ([{"role": 3, "content": "hi"}], "no role"),
        ([{"role": "user", "content": None}], "a user turn needs content"),
        ([USER, {"role": "system"}], "message 2: a system turn needs content"),
        ([{"role": "user", "content": 5}], "the content is a number"),
        ([{"role": "user", "content": [{"type": "text"}]}], "a text part without text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}], "'image_url'"),
    ],
)
def test_chats_that_cannot_be_are_row_errors_that_say_why(
    builder: Builder, record: MakeRecord, messages: Any, words: str
) -> None:
    good, bad, after = builder(["messages"]).build_many(rows(record, [USER], messages, [USER]))
    assert good.token_ids == after.token_ids
    assert good.error is after.error is None
    assert why(bad).startswith("invalid_prompt: rows.jsonl:2")
    assert words in why(bad)


def test_messages_may_be_json_text_or_parquet_structs(builder: Builder, record: MakeRecord, hf: HF) -> None:
    template = "{% for m in messages %}{{ m.content }}{% if m.name is defined %}!{{ m.name }}{% endif %}{% endfor %}"
    make = builder(["messages"], hf(template))
    struct = [{**USER, "name": None, "tool_calls": None}]  # every field is there in every row
    expected = make.build(record(messages=[USER]))
    assert make.build(record(messages=json.dumps([USER]))) == expected
    assert make.build(record(messages=struct)) == expected


def test_half_of_a_surrogate_pair_in_json_text_costs_only_its_row(builder: Builder, record: MakeRecord, hf: HF) -> None:
    bad = '[{"role": "user", "content": "half \\ud83d"}]'
    first, middle, last = builder(["messages"], hf(CHATML)).build_many(rows(record, [USER], bad, [USER]))
    assert first.token_ids == last.token_ids
    assert why(middle).startswith("invalid_encoding")
    why(middle).encode()


# -- templates that refuse, loop or flood


def test_a_template_that_refuses_rows_refuses_only_those(builder: Builder, record: MakeRecord, hf: HF) -> None:
    chats = [
        [USER],
        [{"role": "system", "content": "Be brief."}, USER],
        [USER, USER],
        [{"role": "assistant", "content": "Hi."}, USER],
        [{"role": "narrator", "content": "Night."}, USER],
        [USER],
    ]
    prompts = builder(["messages"], hf()).build_many(rows(record, *chats))
    assert [p.error is None for p in prompts] == [True, False, False, False, False, True]
    assert "this model has no system role" in why(prompts[1])
    for prompt in prompts[2:5]:
        assert why(prompt).startswith("template_error")
        assert "turns must alternate" in why(prompt)


def test_a_system_text_for_which_the_template_has_no_place_is_refused_at_once(builder: Builder, hf: HF) -> None:
    with pytest.raises(UsageError, match=r"no system role.*leave --system out"):
        builder(["prompt"], hf(), system="Be brief.")


def test_a_system_text_that_the_template_leaves_out_is_a_warning(builder: Builder, hf: HF) -> None:
    make = builder(["prompt"], hf("{{ messages[-1].content }}"), system="Be brief.")
    assert "leaves the system message out" in make.warnings[0]


@pytest.mark.parametrize("options", [{"chat": True}, {"system": "x"}, {"messages": "messages"}])
def test_a_chat_without_a_template_is_refused_at_once(builder: Builder, hf: HF, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="no chat template"):
        builder(["prompt", "messages"], hf(None), **options)


def test_without_a_template_mixed_rows_fail_one_by_one(builder: Builder, record: MakeRecord, hf: HF) -> None:
    make = builder(["prompt", "messages"], hf(None))
    text, chat = make.build_many([record(0, prompt="x"), record(1, messages=[USER])])
    assert text.error is None
    assert why(chat).startswith("template_error")


@pytest.mark.parametrize(
    "body",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__.os.getpid() }}",
        "{{ messages.append(messages[0]) }}",
        "{{ ''.__class__.__subclasses__() }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_cannot_reach_out_of_its_sandbox(builder: Builder, record: MakeRecord, hf: HF, body: str) -> None:
    assert why(builder(["messages"], hf(body)).build(record(messages=[USER]))).startswith("template_error")


SLOW_IF_ASKED = (
    "{% if messages[0].content == 'slow' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    "{% endfor %}{% endif %}{{ messages[0].content }}"
)


def test_a_template_that_loops_is_stopped_and_the_next_row_goes_on(
    builder: Builder, record: MakeRecord, hf: HF
) -> None:
    make = builder(["messages"], hf(SLOW_IF_ASKED), render_seconds=0.2)
    started = time.monotonic()
    slow, fine = make.build_many(rows(record, [{"role": "user", "content": "slow"}], [USER]))
    assert time.monotonic() - started < 5
    assert "took longer than 0.2 s" in why(slow)
    assert fine.error is None


def test_a_template_that_always_loops_is_refused_at_once(builder: Builder, hf: HF) -> None:
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(UsageError, match=r"longer than 0\.2 s"):
        builder(["messages"], hf(loop), render_seconds=0.2)


def test_a_template_that_writes_too_much_is_a_row_error(builder: Builder, record: MakeRecord, hf: HF) -> None:
    flood = "{% if messages[0].content == 'flood' %}{{ 'x' * 5000 }}{% endif %}"
    make = builder(["messages"], hf(flood + "ok"), render_chars=1000)
    first, second = make.build_many(rows(record, [{"role": "user", "content": "flood"}], [USER]))
    assert "wrote 5,002 characters" in why(first)
    assert second.error is None


def test_a_row_cannot_bring_a_template(builder: Builder, record: MakeRecord, hf: HF) -> None:
    make = builder(["messages", "chat_template"], hf(CHATML))
    row = record(messages=[{**USER, "chat_template": "EVIL"}], chat_template="EVIL")
    assert "EVIL" not in (make.prompt_text(row) or "")
