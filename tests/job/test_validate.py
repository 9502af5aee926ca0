"""What `validate` reports: counts, examples with line numbers, lengths, duplicates, shared prefixes, special tokens."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchjob.errors import InputDataError
from batchjob.inputs.duplicates import DuplicateFinder
from batchjob.job.validate import PrefixShare, Report, length_histogram, length_summary, validate_job
from batchjob.sampling import SamplingParams
from batchjob.spec import JobSpec

WriteJsonl = Callable[[Path, Iterable[Any]], Path]


def check(path: Path, *, max_model_len: int = 40, tokenizer: Path | None = None, **options: Any) -> Report:
    model = None if tokenizer is None else SimpleNamespace(path=str(tokenizer))
    settings: Any = SimpleNamespace(
        model=model,
        sampling=SamplingParams(),
        max_model_len=max_model_len,
        vocab_size=65_536,
        has_chat_template=True,
        special_tokens=dict,
    )
    return validate_job(JobSpec(input=(str(path),), **options), settings)


def test_everything_about_one_input(tmp_path: Path) -> None:
    shared = " ".join(f"w{index}" for index in range(31))  # with the start token two blocks of 16
    lines = [json.dumps({"id": index, "prompt": f"{shared} question {index}"}) for index in range(8)]
    lines += [
        '{"id": 3, "prompt": "again"}',
        '{"id": "3", "prompt": "text, not a number"}',
        "",
        "broken",
        '{"id": null, "prompt": null}',
        json.dumps({"id": 12, "prompt": "word " * 100}),
        '{"id": 13, "prompt": "ends </s> here"}',
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines))
    report = check(path)
    assert (report.num_rows, report.num_bad_rows, report.exit_code) == (14, 3, 65)
    assert {kind: found["count"] for kind, found in report.errors.items()} == {
        "invalid_json": 1,
        "invalid_prompt": 1,
        "prompt_too_long": 1,
    }
    assert "a.jsonl:12" in report.errors["invalid_json"]["examples"][0]
    assert report.num_duplicate_ids == 1
    (duplicate,) = report.duplicate_id_examples
    assert duplicate == {"id": "3", "first": f"{path}:4", "again": f"{path}:9"}
    assert report.num_missing_ids == 2
    assert report.num_rows_with_special_tokens == 1
    assert report.special_token_examples == [f"{path}:15: </s>"]
    lengths = [34] * 8 + [2, 5, 4]
    assert report.num_prompt_tokens == sum(lengths)
    assert report.shared_prefix_share == pytest.approx(7 * 32 / sum(lengths))
    assert report.token_lengths["max"] == 34
    assert sum(report.token_histogram.values()) == 11
    assert report.first_prompt_text == f"{shared} question 0"
    assert len(report.first_prompt_tokens) == 34
    text = report.render()
    for words in ("14 rows", "bad rows: 3", "a.jsonl:12", "duplicate ids in 'id': 1", "32-63", "first prompt"):
        assert words in text
    assert json.loads(json.dumps(report.to_dict()))["exit_code"] == 65


def test_a_clean_input_is_exit_0(tmp_path: Path, write_jsonl: WriteJsonl) -> None:
    report = check(write_jsonl(tmp_path / "a.jsonl", [{"prompt": f"row {index}"} for index in range(500)]))
    assert (report.exit_code, report.num_rows, report.errors, report.id_column) == (0, 500, {}, None)


def test_a_few_bad_rows_are_allowed_as_in_a_run(tmp_path: Path, write_jsonl: WriteJsonl) -> None:
    rows: list[Any] = [{"prompt": "x"}] * 99 + [{"prompt": None}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    assert check(path).exit_code == 0
    assert check(path, max_error_rate=0.0).exit_code == 65


def test_no_rows_and_no_prompt_column(tmp_path: Path, write_jsonl: WriteJsonl) -> None:
    report = check(write_jsonl(tmp_path / "empty.jsonl", []))
    assert (report.num_rows, report.exit_code) == (0, 0)
    assert "no rows" in report.render()
    with pytest.raises(InputDataError, match="text"):
        check(write_jsonl(tmp_path / "a.jsonl", [{"text": "x"}]))


def test_with_a_real_tokenizer_and_chat(tmp_path: Path, write_jsonl: WriteJsonl, tiny_tokenizer: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "Hi"}, {"prompt": "a <|end|> b"}])
    report = check(path, tokenizer=tiny_tokenizer, chat=True, max_model_len=100)
    assert report.first_prompt_text == "<s>user: Hi<|end|>"
    assert report.first_prompt_tokens[0] == "<s>"
    assert report.first_prompt_tokens[-1] == "<|end|>"
    assert report.num_rows_with_special_tokens == 1  # those of the template do not count


def test_what_is_printed_is_safe_for_a_terminal(tmp_path: Path, write_jsonl: WriteJsonl) -> None:
    report = check(write_jsonl(tmp_path / "a.jsonl", [{"prompt": "\x1b[2J evil\r\x07"}]))
    assert "\x1b" not in report.render()
    assert "\r" not in report.render()


@given(st.lists(st.integers(0, 20)), st.integers(1, 10))
def test_duplicates_are_counted_exactly_also_on_disk(keys: list[int], in_memory: int) -> None:
    with DuplicateFinder(in_memory=in_memory, num_files=3) as finder:
        for line, key in enumerate(keys, 1):
            finder.add(json.dumps(key), f"f:{line}")
        count, examples = finder.result()
    assert count == len(keys) - len(set(keys))
    assert len(examples) == min(5, count)
    for example in examples:
        first, again = (int(example[name].split(":")[1]) for name in ("first", "again"))
        assert keys.index(int(example["id"])) + 1 == first < again
        assert keys[again - 1] == int(example["id"])


def test_looking_for_duplicates_takes_bounded_memory() -> None:
    tracemalloc.start()
    with DuplicateFinder(in_memory=1000) as finder:
        for index in range(20_000):
            finder.add(f'"id-{index % 19_990}"', f"a.jsonl:{index}")
        count, _ = finder.result()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 10
    assert peak < 3 << 20


def test_prefix_share_counts_full_blocks_that_were_there_before() -> None:
    share = PrefixShare(4)
    share.add([1, 2, 3, 4, 5, 6, 7, 8, 9])
    share.add([1, 2, 3, 4, 5, 6, 7, 8, 8])
    share.add([9, 2, 3, 4, 5, 6, 7, 8])  # another start: nothing is shared
    assert share.share == 8 / 26
    assert share.exact
    small = PrefixShare(1, max_blocks=2)
    small.add([1, 2, 3])
    assert not small.exact


def test_length_figures() -> None:
    lengths = Counter({1: 50, 2: 40, 64: 9, 1000: 1})
    summary = length_summary(lengths)
    assert (summary["min"], summary["median"], summary["p90"], summary["p99"], summary["max"]) == (1, 1, 2, 64, 1000)
    histogram = length_histogram(lengths)
    assert (histogram["1-1"], histogram["64-127"], histogram["512-1023"]) == (50, 9, 1)
    assert sum(histogram.values()) == 100
    assert length_summary(Counter()) == {}
