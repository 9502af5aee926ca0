"""What every row must fail of is told before anything is made, by `run` and by `validate`; a bad row stops no job."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

import batchjob
from batchjob.errors import BatchJobError
from batchjob.job.validate import validate
from batchjob.prompts import PromptBuilder, PromptConfig
from batchjob.store.manifest import Manifest

Write = Callable[[Path, Iterable[Any]], Path]


def spec_of(source: Path, **settings: Any) -> batchjob.JobSpec:
    return batchjob.JobSpec(input=(str(source),), engine="fake", progress="none", max_tokens=2, **settings)


def refused(source: Path, **settings: Any) -> str:
    """The message with which both `run` and `validate` refuse a job; nothing is left behind."""
    output = source.parent / "out"
    messages = []
    for attempt in (
        lambda: batchjob.run(spec_of(source, output=str(output), **settings), echo=lambda line: None),
        lambda: validate(spec_of(source, **settings)),
    ):
        with pytest.raises(BatchJobError) as caught:
            attempt()
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert not output.exists()
    return messages[0]


def lines_of(source: Path, **settings: Any) -> tuple[str, int]:
    """What a person is told, and the rows that are ok."""
    lines: list[str] = []
    result = batchjob.run(spec_of(source, output=str(source.parent / "out"), **settings), echo=lines.append)
    return "\n".join(lines), result.num_ok


TURN = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("row", "settings", "words"),
    [
        ({"prompt": "x", "params": {"city": "Oslo"}}, {}, "--params none"),
        ({"prompt": "x", "messages": TURN}, {}, "choose one with --prompt, --messages"),
        ({"turns": ["a"]}, {"prompt": "turns"}, "--prompt 'turns.0'"),
        ({"body": {"x": 1}}, {"prompt": "body.y"}, "'body' has 'x'"),
        ({"number": 1}, {"prompt": "number"}, "--prompt '{number}'"),
        ({"messages": TURN, "tools": "hammer"}, {}, "--chat-columns none"),
        ({"prompt": "x", "output": 1}, {}, "--keep-columns"),
        ({"prompt": "x"}, {"time_limit": "soon"}, "must be a time"),
    ],
)
def test_what_all_rows_fail_of_is_refused_with_its_remedy(
    tmp_path: Path, write_jsonl: Write, row: dict[str, Any], settings: dict[str, Any], words: str
) -> None:
    assert words in refused(write_jsonl(tmp_path / "in.jsonl", [row] * 250), **settings)


def test_columns_that_clash_after_keep_columns_do_not(tmp_path: Path, write_jsonl: Write) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "x", "output": 1}])
    assert validate(spec_of(source, keep_columns="prompt")).exit_code == 0


def test_one_good_row_behind_many_bad_ones_runs(tmp_path: Path, write_jsonl: Write) -> None:
    bad = {"prompt": "x", "params": {"city": "Oslo"}}
    source = write_jsonl(tmp_path / "in.jsonl", [*[bad] * 250, {"prompt": "x"}])
    lines, num_ok = lines_of(source)
    assert "warning: the first 100 rows cannot be run" in lines
    assert "--params none" in lines
    assert num_ok == 1


def test_bad_data_alone_is_no_reason_to_refuse_a_job(tmp_path: Path, write_jsonl: Write) -> None:
    lines, num_ok = lines_of(write_jsonl(tmp_path / "in.jsonl", [{"prompt": None, "x": 1}] * 3))
    assert "the first 3 rows cannot be run" in lines
    assert num_ok == 0
    assert len(pyarrow.parquet.read_table(next((tmp_path / "out" / "data").iterdir()))) == 3


@pytest.mark.parametrize(
    ("row", "settings", "words"),
    [
        ({"prompt": "x", "tools": [{"name": "f"}]}, {}, "column tools is not used"),
        ({"prompt": "x", "continue_final_message": True}, {}, "column continue_final_message is not used"),
        ({"body": {"messages": TURN, "max_tokens": 5}}, {"messages": "body.messages"}, "body.max_tokens are not used"),
    ],
)
def test_what_is_not_used_is_said(
    tmp_path: Path, write_jsonl: Write, row: dict[str, Any], settings: dict[str, Any], words: str
) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [row])
    assert words in lines_of(source, **settings)[0]
    assert words in validate(spec_of(source, **settings)).render()


def test_what_the_template_has_no_use_for_is_said(
    tmp_path: Path, write_jsonl: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchjob.prompts.fake_tokenizer.FakeTokenizer.template_mentions", lambda self, name: False)
    row = {"messages": TURN, "tools": [{"name": "f"}], "chat_template_kwargs": {"enable_thinking": False}}
    lines = lines_of(write_jsonl(tmp_path / "in.jsonl", [row]))[0]
    assert "no use for the rows' tools, enable_thinking" in lines


def test_the_clock_is_frozen_in_the_job(tmp_path: Path, write_jsonl: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []

    class Watched(PromptBuilder):
        def __init__(self, config: PromptConfig, tokenizer: Any) -> None:
            seen.append(config.clock)
            super().__init__(config, tokenizer)

    monkeypatch.setattr("batchjob.prompts.PromptBuilder", Watched)
    monkeypatch.setattr("batchjob.job.open.now", lambda: "2001-02-03T04:05:06")
    source = write_jsonl(tmp_path / "in.jsonl", [{"messages": TURN}])
    lines_of(source)
    path = tmp_path / "out" / ".batchjob" / "job.json"
    manifest = Manifest.from_bytes(path.read_bytes(), source=str(path))
    assert manifest.resolved["clock"] == "2001-02-03T04:05:06"
    assert seen
    assert set(seen) == {"2001-02-03T04:05:06"}
