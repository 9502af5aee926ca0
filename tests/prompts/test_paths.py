"""Dotted paths into rows, in every place that takes a column, and what a row gives to its chat template."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from batchjob.errors import InputDataError, UsageError
from batchjob.prompts import PromptBuilder, PromptSource, prompt_columns, resolve_prompt
from batchjob.prompts.forms import InvalidPrompt
from batchjob.prompts.hf_tokenizer import HFTokenizer
from batchjob.prompts.paths import look_up
from batchjob.records import Prompt, Record
from batchjob.sampling import SamplingParams
from batchjob.spec import JobSpec

Builder = Callable[..., PromptBuilder]
MakeRecord = Callable[..., Record]
HF = Callable[..., HFTokenizer]

ROW = {
    "a.b": 1,
    "a": {"b": 2, "c": {"d.e": 3, "d": {"e": 4}}, "list": [{"x": 5}, None]},
    "map": [{"key": "k", "value": 6}],
    "null": None,
    "text": "t",
}
TEMPLATE = (
    "{% if tools %}<{{ tools | tojson }}>{% endif %}"
    "{% if enable_thinking is defined %}T={{ enable_thinking }} {% endif %}"
    "{% for m in messages %}{{ m.content }}|{% endfor %}{% if add_generation_prompt %}GO{% endif %}"
)
CLOCK = "{{ strftime_now('%d %b %Y') }} {{ messages[0].content }}"


def why(prompt: Prompt) -> str:
    assert prompt.error is not None
    return prompt.error.message


@pytest.mark.parametrize(
    ("path", "value"),
    [("a.b", 1), ("a.c.d.e", 3), ("a.list.0.x", 5), ("a.list.1", None), ("map.k", 6), ("null", None), ("gone", None)],
)
def test_a_path_finds_its_value_and_exact_names_come_first(path: str, value: Any) -> None:
    assert look_up(ROW, path) == value


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("a.z", "'a' has 'b', 'c', 'list'"),
        ("a.list.2", "a list of 2"),
        ("a.list.-1", "'a.list' is a list"),
        ("a.list.1.x", "'a.list.1' is null"),
        ("text.x", "'text' is text"),
        ("map.z", "'map' has 'k'"),
        ("null.x", "'null' is null or absent"),
    ],
)
def test_a_path_that_a_row_lacks_says_where_it_ends(path: str, words: str) -> None:
    with pytest.raises(InvalidPrompt, match=words.replace("[", "\\[")):
        look_up(ROW, path)


def test_every_flag_takes_a_path_and_only_its_column_is_read() -> None:
    spec = JobSpec(messages="body.messages", params="body.settings", id="meta.name")
    source = resolve_prompt(spec, ["body", "meta", "other"])
    assert source.read == ["body", "meta"]
    assert PromptSource.from_dict(json.loads(json.dumps(source.to_dict()))) == source
    assert prompt_columns(JobSpec(prompt="{a.b} {c}"), ["a", "a.b", "c", "d"]) == ["a.b", "c"]
    assert prompt_columns(JobSpec(prompt_token_ids="x.0"), ["x"]) == ["x"]
    with pytest.raises(InputDataError, match=r"no input row has a column 'gone\.x'"):
        resolve_prompt(JobSpec(prompt="gone.x"), ["x"])


def test_lines_of_a_batch_file_run_as_they_are(builder: Builder, record: MakeRecord) -> None:
    make = builder(["custom_id", "body"], messages="body.messages", params="body.settings", id="custom_id")
    body = {"messages": [{"role": "user", "content": "hi"}], "settings": {"max_tokens": 3}, "tools": [{"name": "f"}]}
    prompt = make.build(record(custom_id="c7", body=body))
    assert prompt.params == SamplingParams(max_tokens=3)
    assert make.prompt_text(record(body=body)) == '<s>[tools] [{"name": "f"}] [user] hi [assistant]'
    assert "(custom_id c7)" in why(make.build(record(custom_id="c7", body={"messages": 1})))


def test_templates_take_paths_and_objects_name_them(builder: Builder, record: MakeRecord) -> None:
    make = builder(["turns", "x"], prompt="{turns.0} / {x.y}")
    assert make.prompt_text(record(turns=["first", "second"], x={"y": [1]})) == "first / [1]"
    assert "'x' has 'z'" in why(make.build(record(turns=["first"], x={"z": 1})))
    assert "--prompt 'turns.0'" in why(builder(["turns"], prompt="turns").build(record(turns=["a"])))
    assert "--prompt 'x.z'" in why(builder(["x"], prompt="x").build(record(x={"z": "a"})))


def test_a_jobs_fingerprint_is_that_of_before_where_nothing_is_new() -> None:
    assert set(resolve_prompt(JobSpec(), ["prompt"]).to_dict()) == {"kind", "columns", "template", "params", "id"}


# -- what goes to the chat template


def test_a_row_gives_tools_and_variables_to_its_template(builder: Builder, record: MakeRecord, hf: HF) -> None:
    columns = ["messages", "tools", "chat_template_kwargs", "continue_final_message", "add_generation_prompt"]
    make = builder(columns, hf(TEMPLATE))
    turn = [{"role": "user", "content": "hi"}]
    assert make.prompt_text(record(messages=turn)) == "hi|GO"
    tools = [{"name": "f", "default": None}]  # Parquet has every field
    row = record(messages=turn, tools=tools, chat_template_kwargs={"enable_thinking": False})
    assert make.prompt_text(row) == '<[{"name": "f"}]>T=False hi|GO'
    assert make.prompt_text(record(messages=turn, tools=json.dumps(tools))) == '<[{"name": "f", "default": null}]>hi|GO'
    assert make.prompt_text(record(messages=turn, tools=[])) == "hi|GO"
    assert make.prompt_text(record(messages=turn, add_generation_prompt=False)) == "hi|"
    begun = [*turn, {"role": "assistant", "content": "Well"}]
    assert make.prompt_text(record(messages=begun, continue_final_message=True)) == "hi|Well"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tools": "hammer"}, "'tools' goes to the chat template and holds text, not JSON; --chat-columns none"),
        ({"tools": ["hammer"]}, "not a list of objects"),
        ({"chat_template_kwargs": [1]}, "not an object"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "may not set chat_template"),
        ({"chat_template_kwargs": {"strftime_now": "x"}}, "may not set strftime_now"),
        ({"continue_final_message": "yes"}, "'continue_final_message'"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "exclude each other"),
    ],
)
def test_what_a_template_cannot_take_is_a_row_error(
    builder: Builder, record: MakeRecord, fields: dict[str, Any], words: str
) -> None:
    make = builder(["messages", *fields])
    assert words in why(make.build(record(messages=[{"role": "user", "content": "hi"}], **fields)))


def test_chat_columns_can_be_chosen() -> None:
    columns = ["messages", "tools", "documents"]
    assert resolve_prompt(JobSpec(), columns).chat_columns == ("tools", "documents")
    assert resolve_prompt(JobSpec(chat_columns="tools"), columns).chat_columns == ("tools",)
    assert resolve_prompt(JobSpec(chat_columns="none"), columns).chat_columns == ()
    assert resolve_prompt(JobSpec(), ["prompt", "tools"]).chat_columns == ()
    with pytest.raises(UsageError, match="'hammer' is none of"):
        resolve_prompt(JobSpec(chat_columns="hammer"), columns)
    with pytest.raises(InputDataError, match="no input row has a column 'chat_template_kwargs'"):
        resolve_prompt(JobSpec(chat_columns="chat_template_kwargs"), columns)
    assert resolve_prompt(JobSpec(params="none"), ["prompt", "params"]).params is None


def test_the_clock_of_a_template_is_the_jobs(builder: Builder, record: MakeRecord, hf: HF) -> None:
    make = builder(["messages"], hf(CLOCK), clock="2001-02-03T04:05:06")
    assert make.prompt_text(record(messages=[{"role": "user", "content": "hi"}])) == "03 Feb 2001 hi"
    assert hf(CLOCK).template_mentions("strftime_now")
    assert not hf(TEMPLATE).template_mentions("strftime_now")


def test_an_end_token_behind_each_text_is_a_warning(builder: Builder, hf: HF) -> None:
    from tokenizers import processors

    tokenizer = hf()
    assert builder(["prompt"], tokenizer).warnings == []
    tokenizer._backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    try:
        assert "puts </s> behind each text" in builder(["prompt"], tokenizer).warnings[0]
        assert builder(["prompt"], tokenizer, chat=True).warnings == []
    finally:
        tokenizer._backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
