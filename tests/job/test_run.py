"""`batchjob.run` on the fake engine: a new job, a resume, a refusal, limits, samples, shards."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow.dataset
import pyarrow.parquet
import pytest

import batchjob
from batchjob.report.result import RunResult

Write = Callable[[Path, Iterable[Any]], Path]


def rows_of(output: Path) -> list[dict[str, Any]]:
    """All output rows in the order of the parts."""
    paths = sorted((output / "data").iterdir())
    return [row for path in paths for row in pyarrow.parquet.read_table(path).to_pylist()]


def run(source: Path, output: Path, **settings: Any) -> RunResult:
    spec = batchjob.JobSpec(input=(str(source),), output=str(output), engine="fake", progress="none", **settings)
    return batchjob.run(spec, echo=lambda line: None)


@pytest.fixture
def prompts(tmp_path: Path, write_jsonl: Write) -> Path:
    words = ("north", "south", "east", "west", "up", "down", "left")
    return write_jsonl(
        tmp_path / "in.jsonl",
        [{"id": f"r{i}", "prompt": " ".join(words[j % 7] for j in range(i, i + 3 + i % 5))} for i in range(300)],
    )


def test_every_row_once_in_input_order(prompts: Path, tmp_path: Path) -> None:
    result = run(prompts, tmp_path / "out", chunk_rows=64)
    rows = rows_of(tmp_path / "out")
    assert [row["row_index"] for row in rows] == list(range(300))
    assert [row["id"] for row in rows] == [f"r{i}" for i in range(300)]
    assert all(row["status"] == "ok" and row["output"] and row["finish_reason"] == "stop" for row in rows)
    assert (result.exit_code, result.rows_done, result.num_ok, result.job_complete) == (0, 300, 300, True)


def test_the_same_command_again_does_nothing(prompts: Path, tmp_path: Path) -> None:
    run(prompts, tmp_path / "out")
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in (tmp_path / "out" / "data").iterdir()}
    result = run(prompts, tmp_path / "out")
    after = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in (tmp_path / "out" / "data").iterdir()}
    assert before == after
    assert (result.exit_code, result.rows_reused, result.output_tokens) == (0, 300, 0)


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"temperature": 0.7}, "sampling.temperature: 0.0 → 0.7"),
        ({"seed": 3}, "sampling.seed: 0 → 3"),
        ({"n": 2}, "sampling.n: 1 → 2"),
        ({"max_model_len": 100}, "max_model_len: 8192 → 100"),
        ({"prompt": "Say {prompt}"}, "prompt.template"),
        ({"system": "Be brief."}, "prompt.system"),
        ({"keep_columns": "none"}, "keep_columns"),
        ({"limit": 5}, "limit: null → 5"),
        ({"chunk_rows": 7}, "chunk_rows"),
        ({"length_policy": "truncate-left"}, "length_policy"),
        ({"output_token_ids": True}, "output_token_ids"),
        ({"stop": ("x",)}, "sampling.stop"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_resume_with_other_settings_is_refused_and_says_which(
    prompts: Path, tmp_path: Path, change: dict[str, Any], shown: str
) -> None:
    run(prompts, tmp_path / "out")
    with pytest.raises(batchjob.ConfigMismatchError) as caught:
        run(prompts, tmp_path / "out", **change)
    assert shown in str(caught.value)


def test_settings_that_do_not_change_results_are_free(prompts: Path, tmp_path: Path) -> None:
    run(prompts, tmp_path / "out", chunk_rows=64)
    free = {"max_num_seqs": 3, "block_size": 8, "num_shards": 2, "flush_interval": 1.0, "order": "input", "raw": True}
    assert run(prompts, tmp_path / "out", **free).exit_code == 0


def test_results_do_not_depend_on_batching_or_order(prompts: Path, tmp_path: Path) -> None:
    run(prompts, tmp_path / "a", temperature=1.0)
    run(
        prompts,
        tmp_path / "b",
        temperature=1.0,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        order="length",
        num_shards=1,
    )
    assert [row["output"] for row in rows_of(tmp_path / "a")] == [row["output"] for row in rows_of(tmp_path / "b")]


def test_a_changed_input_is_refused(prompts: Path, tmp_path: Path) -> None:
    run(prompts, tmp_path / "out", chunk_rows=64)
    prompts.write_text(prompts.read_text().replace("north", "nord"))
    with pytest.raises(batchjob.InputMissingError, match="has changed"):
        run(prompts, tmp_path / "out", chunk_rows=64)


def test_a_touched_input_is_not_a_changed_one(prompts: Path, tmp_path: Path) -> None:
    run(prompts, tmp_path / "out")
    prompts.touch()
    assert run(prompts, tmp_path / "out").exit_code == 0


def test_a_new_file_in_the_input_directory_is_refused(prompts: Path, tmp_path: Path, write_jsonl: Write) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", [{"prompt": "one"}])
    run(folder, tmp_path / "out")
    write_jsonl(folder / "b.jsonl", [{"prompt": "two"}])
    with pytest.raises(batchjob.InputMissingError, match=r"b\.jsonl was not there"):
        run(folder, tmp_path / "out")


def test_an_input_without_rows_gives_one_empty_part(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n\n")
    result = run(tmp_path / "empty.jsonl", tmp_path / "out")
    (part,) = (tmp_path / "out" / "data").iterdir()
    table = pyarrow.parquet.read_table(part)
    assert (table.num_rows, result.exit_code) == (0, 0)
    assert {"row_index", "status", "output"} <= set(table.column_names)
    assert run(tmp_path / "empty.jsonl", tmp_path / "out").exit_code == 0


def test_failed_rows_are_rows(tmp_path: Path, write_jsonl: Write) -> None:
    source = write_jsonl(
        tmp_path / "in.jsonl", [{"prompt": "good"}, {"prompt": None}, {"other": 1}, {"prompt": "fine"}]
    )
    result = run(source, tmp_path / "out")
    rows = rows_of(tmp_path / "out")
    assert [row["status"] for row in rows] == ["ok", "error", "error", "ok"]
    assert all("prompt" in row["error_message"] for row in rows[1:3])
    assert (result.exit_code, result.errors) == (65, {"invalid_prompt": 2})
    assert "--max-error-rate" in result.render()


@pytest.mark.parametrize(("rate", "code"), [(0.5, 0), (0.49, 65)])
def test_max_error_rate_decides_the_exit_code(tmp_path: Path, write_jsonl: Write, rate: float, code: int) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "good"}, {"prompt": None}])
    assert run(source, tmp_path / "out", max_error_rate=rate).exit_code == code


def test_all_rows_failed_is_never_a_success(tmp_path: Path, write_jsonl: Write) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": None, "x": 1}, {"prompt": None, "x": 2}])
    assert run(source, tmp_path / "out", max_error_rate=1.0).exit_code == 65


def test_samples_of_a_row_are_rows_of_their_own(prompts: Path, tmp_path: Path) -> None:
    run(prompts, tmp_path / "out", n=3, temperature=1.0, limit=20)
    rows = rows_of(tmp_path / "out")
    assert [(row["row_index"], row["sample_index"]) for row in rows] == [(i, s) for i in range(20) for s in range(3)]
    assert len({row["output"] for row in rows if row["row_index"] == 0}) > 1


def test_params_of_a_row_win_over_those_of_the_job(tmp_path: Path, write_jsonl: Write) -> None:
    rows = [
        {"prompt": "a b", "params": {"max_tokens": 1, "ignore_eos": True}},
        {"prompt": "a b", "params": {"n": 2}},
        {"prompt": "a b", "params": {"temprature": 1}},
        {"prompt": "a b"},
    ]
    run(write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out", max_tokens=9)
    out = rows_of(tmp_path / "out")
    assert [row["row_index"] for row in out] == [0, 1, 1, 2, 3]
    assert (out[0]["num_output_tokens"], out[0]["finish_reason"]) == (1, "length")
    assert out[3]["error_type"] == "invalid_params"
    assert "temprature" in out[3]["error_message"]


def test_a_prompt_too_long_is_a_row_error_with_both_numbers(tmp_path: Path, write_jsonl: Write) -> None:
    rows = [{"prompt": "short"}, {"prompt": "word " * 50}, {"prompt": "short too"}]
    run(write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out", max_model_len=32)
    out = rows_of(tmp_path / "out")
    assert [row["error_type"] for row in out] == [None, "prompt_too_long", None]
    assert "52" in out[1]["error_message"]
    assert "32" in out[1]["error_message"]


def test_a_row_larger_than_the_cache_is_a_row_error_and_blocks_nobody(tmp_path: Path, write_jsonl: Write) -> None:
    rows = [{"prompt": f"small {i}"} for i in range(10)]
    rows.insert(4, {"prompt": "word " * 300})
    run(
        write_jsonl(tmp_path / "in.jsonl", rows),
        tmp_path / "out",
        kv_cache_memory=str(12 * 16 * 1024),
        max_error_rate=1.0,
    )
    out = rows_of(tmp_path / "out")
    assert [row["error_type"] for row in out] == [None] * 4 + ["kv_cache_too_small"] + [None] * 6


def test_shards_share_one_output(prompts: Path, tmp_path: Path) -> None:
    first = run(prompts, tmp_path / "out", num_shards=3, shard_id=1, chunk_rows=10)
    assert (first.rows_done, first.job_complete) == (100, False)
    assert "other shards" in first.render()
    run(prompts, tmp_path / "out", num_shards=3, shard_id=0, chunk_rows=10)
    last = run(prompts, tmp_path / "out", num_shards=3, shard_id=2, chunk_rows=10)
    assert last.job_complete
    assert [row["row_index"] for row in rows_of(tmp_path / "out")] == list(range(300))


def test_another_number_of_shards_finishes_what_is_left(prompts: Path, tmp_path: Path) -> None:
    run(prompts, tmp_path / "out", num_shards=4, shard_id=2, chunk_rows=10)
    assert run(prompts, tmp_path / "out", chunk_rows=10).job_complete
    assert [row["row_index"] for row in rows_of(tmp_path / "out")] == list(range(300))


def test_output_opens_as_a_dataset_with_carried_columns(prompts: Path, tmp_path: Path) -> None:
    run(prompts, tmp_path / "out", chunk_rows=50, output_token_ids=True)
    table = pyarrow.dataset.dataset(tmp_path / "out" / "data").to_table()
    assert table.num_rows == 300
    assert table.column_names == [
        "row_index", "sample_index", "id", "prompt", "status", "output", "finish_reason", "num_prompt_tokens",
        "num_output_tokens", "error_type", "error_message", "output_token_ids",
    ]  # fmt: skip


def test_a_parquet_input_keeps_its_types(tmp_path: Path) -> None:
    import pyarrow as pa

    table = pa.table({"prompt": ["a", "b"], "n": pa.array([1, None], pa.uint64()), "t": pa.array([[1], None])})
    pyarrow.parquet.write_table(table, tmp_path / "in.parquet")
    run(tmp_path / "in.parquet", tmp_path / "out", keep_columns="t,n")
    out = pyarrow.dataset.dataset(tmp_path / "out" / "data").to_table()
    assert out.column("n").type == pa.uint64()
    assert out.column("t").to_pylist() == [[1], None]
    assert "prompt" not in out.column_names


def test_wrong_usage_is_told_before_anything_is_made(tmp_path: Path, prompts: Path) -> None:
    with pytest.raises(batchjob.InputDataError, match="no input row has a column 'nope'"):
        run(prompts, tmp_path / "out", prompt="nope")
    with pytest.raises(batchjob.UsageError, match="--model"):
        batchjob.run(batchjob.JobSpec(input=(str(prompts),), output=str(tmp_path / "out")), echo=lambda line: None)
    with pytest.raises(batchjob.InputMissingError):
        run(tmp_path / "missing.jsonl", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_manifest_records_what_was_asked_and_what_it_became(prompts: Path, tmp_path: Path) -> None:
    run(prompts, tmp_path / "out", max_tokens=7)
    manifest = json.loads((tmp_path / "out" / ".batchjob" / "job.json").read_text())
    assert manifest["spec"]["max_tokens"] == 7
    assert manifest["resolved"]["sampling"]["temperature"] == 0.0
    assert manifest["fingerprint"]["max_model_len"] == 8192


def test_a_row_that_asks_for_too_many_samples_is_a_row_error(tmp_path: Path, write_jsonl: Write) -> None:
    rows = [{"prompt": "a", "params": {"n": 20_000_000}}, {"prompt": "b", "params": {"n": 2}}]
    run(write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out", max_error_rate=1.0)
    assert [row["error_type"] for row in rows_of(tmp_path / "out")] == ["invalid_params", None, None]
    with pytest.raises(batchjob.UsageError, match="n must be between 1 and 10,000"):
        batchjob.JobSpec(n=20_000_000)
