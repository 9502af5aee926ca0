"""Which columns make the prompt: defaults, flags, templates, and what is refused before anything is loaded."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchjob.errors import InputDataError, UsageError
from batchjob.prompts import PromptSource, prompt_columns, resolve_prompt
from batchjob.prompts.source import parse_template
from batchjob.spec import JobSpec


@pytest.mark.parametrize(
    ("columns", "flags", "kind", "names"),
    [
        (["id", "prompt"], {}, "text", ("prompt",)),
        (["messages", "x"], {}, "messages", ("messages",)),
        (["prompt_token_ids"], {}, "token_ids", ("prompt_token_ids",)),
        (["messages", "prompt"], {}, "any", ("prompt", "messages")),
        (["messages", "prompt"], {"messages": "messages"}, "messages", ("messages",)),
        (["question", "prompt"], {"prompt": "question"}, "text", ("question",)),
        (["a", "b c"], {"prompt": "{b c}: {a} {a}"}, "template", ("b c", "a")),
        (["chats"], {"messages": "chats"}, "messages", ("chats",)),
        (["ids"], {"prompt_token_ids": "ids"}, "token_ids", ("ids",)),
    ],
)
def test_the_prompt_is_found(columns: list[str], flags: dict[str, Any], kind: str, names: tuple[str, ...]) -> None:
    source = resolve_prompt(JobSpec(**flags), columns)
    assert (source.kind, source.columns) == (kind, names)
    assert PromptSource.from_dict(json.loads(json.dumps(source.to_dict()))) == source


def test_params_and_id_are_read_where_they_are_there() -> None:
    assert prompt_columns(JobSpec(), ["id", "params", "prompt", "other"]) == ["prompt", "params", "id"]
    assert prompt_columns(JobSpec(), ["prompt", "other"]) == ["prompt"]
    assert prompt_columns(JobSpec(params="p", id="other", prompt="{other}"), ["p", "other"]) == ["other", "p"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({}, "no prompt"),
        ({"prompt": "question"}, "no input row has a column 'question'"),
        ({"prompt": "Translate this"}, "braces"),
        ({"prompt": "{text} {gone}"}, "'gone'"),
        ({"messages": "chat"}, "--messages"),
        ({"prompt": "text", "params": "p"}, "--params"),
        ({"prompt": "text", "id": "uid"}, "--id"),
    ],
)
def test_a_column_that_no_row_has_is_exit_65_and_lists_those_there_are(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(InputDataError, match=words) as caught:
        resolve_prompt(JobSpec(**flags), ["text", "tag"])
    assert "text, tag" in str(caught.value)


@pytest.mark.parametrize(
    "flags",
    [
        {"prompt": "text", "messages": "text"},
        {"prompt": "a {text"},
        {"prompt": "a } b"},
        {"prompt": "a {} b"},
        {"prompt": "{{no column}}"},
        {"prompt_token_ids": "text", "chat": True},
        {"prompt_token_ids": "text", "system": "x"},
    ],
)
def test_flags_that_make_no_sense_are_usage_errors(flags: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        resolve_prompt(JobSpec(**flags), ["text"])


@given(st.lists(st.tuples(st.booleans(), st.text("ab {}\n", min_size=1)), max_size=6))
def test_templates_round_trip(parts: list[tuple[bool, str]]) -> None:
    parts = [(column, text) for column, text in parts if not (column and set(text) & set("{}"))]
    template = "".join("{" + t + "}" if c else t.replace("{", "{{").replace("}", "}}") for c, t in parts)
    values = {text: f"<{text}>" for column, text in parts if column}
    rendered = "".join(values[text] if column else text for column, text in parse_template(template))
    assert rendered == "".join(values[text] if column else text for column, text in parts)
