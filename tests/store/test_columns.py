"""The table of generated columns: one entry is all that a column needs here, and what is on disk does not change."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from batchjob.errors import ConfigMismatchError
from batchjob.records import Completion, RowError
from batchjob.spec import JobSpec
from batchjob.store import Store, columns
from batchjob.store.columns import COLUMNS, FLAGS, Column, OutputColumns

OK = Completion(7, 1, 3, [5, 6], "é\n", "stop")
FAILED = Completion(8, 0, 3, [], None, None, RowError("engine_error", "no"))


def test_the_bytes_of_a_log_record_are_those_of_format_1() -> None:
    plain, with_ids = OutputColumns(), OutputColumns(["output_token_ids"])
    ok = '{"row":7,"sample":1,"of":2,"prompt_tokens":3,"output_tokens":2,"finish":"stop","text":"é\\n"'
    failed = '{"row":8,"sample":0,"of":2,"prompt_tokens":3,"output_tokens":0,"finish":null,"text":null'
    error = ',"error":["engine_error","no"]}'
    assert plain.encode(OK, 2) == f"{ok}}}".encode()
    assert with_ids.encode(OK, 2) == f'{ok},"token_ids":[5,6]}}'.encode()
    assert plain.encode(FAILED, 2) == f"{failed}{error}".encode()
    assert with_ids.encode(FAILED, 2) == f'{failed},"token_ids":[]{error}'.encode()


def test_the_hashed_form_of_rows_is_that_of_their_records() -> None:
    for output_columns in (OutputColumns(), OutputColumns(["output_token_ids"])):
        payloads = [output_columns.encode(completion, 0) for completion in (OK, FAILED)]
        records: list[dict[str, Any]] = [
            {"row": c.row_index, "sample": c.sample_index, "prompt_tokens": 3, "output_tokens": len(c.token_ids)}
            | {"finish": c.finish_reason, "text": c.text, "token_ids": c.token_ids}
            | ({"error": [c.error.type, c.error.message]} if c.error else {})
            for c in (OK, FAILED)
        ]
        assert all(map(output_columns.is_valid, records))
        assert output_columns.encode_rows(output_columns.values(records)) == b"".join(p + b"\n" for p in payloads)


def test_every_flag_is_one_of_the_job_and_pinned() -> None:
    settings = {field.name: field for field in fields(JobSpec)}
    assert all(settings[flag].metadata["pinned"] for flag in FLAGS)
    assert OutputColumns.asked(JobSpec()).flags == ()
    assert OutputColumns.asked(JobSpec(output_token_ids=True)).flags == ("output_token_ids",)


def test_a_schema_says_which_columns_there_are() -> None:
    for flags in ((), ("output_token_ids",)):
        schema = pa.schema(OutputColumns(flags).schema([pa.field("output_token_ids", pa.string())]))
        assert OutputColumns.of_schema(schema).flags == flags, "a carried column is none of ours, whatever its name"
    whole = [*OutputColumns().schema([])]
    with pytest.raises(ConfigMismatchError, match="'logprob', which this batchjob does not know"):
        OutputColumns.of_schema(pa.schema([*whole, pa.field("logprob", pa.float64())]))
    for less in (whole[1:], whole[:2], whole[:-1], [*whole[:2], *whole[3:]], []):
        with pytest.raises(ValueError, match="not"):
            OutputColumns.of_schema(pa.schema(less))


@pytest.fixture
def new_column(monkeypatch: pytest.MonkeyPatch) -> str:
    """A column that a later version might have, filled from the number of output tokens."""
    kind = next(column.kind for column in COLUMNS if column.name == "num_output_tokens")
    entry = Column("num_steps", kind, "steps", "num_output_tokens", flag="num_steps")
    monkeypatch.setattr(columns, "COLUMNS", (*COLUMNS, entry))
    monkeypatch.setattr(columns, "OWN_COLUMNS", (*columns.OWN_COLUMNS, entry.name))
    return entry.name


def test_a_new_column_is_an_entry(tmp_path: Path, kit: Any, new_column: str) -> None:
    """It is logged, read back from the log by a later attempt, committed, hashed and checked."""
    plan = kit.make_plan(20, 20)
    manifest = kit.make_manifest(plan, columns=OutputColumns([new_column]))
    for stop in (13, 20):
        store = Store.create(tmp_path / "out", manifest, plan)
        store.start_attempt({})
        chunk = store.open_chunk(0)
        for row in range(stop):
            chunk.add(kit.completion(row))
        if stop < 20:
            store.close()
    assert chunk.num_replayed == 13
    assert chunk.commit(kit.carried(plan.chunks[0])).won
    store.finish()
    rows = kit.read_data(tmp_path / "out")
    assert [row[new_column] for row in rows] == [len(kit.completion(row).token_ids) for row in range(20)]


def test_a_job_without_a_new_column_goes_on_without_it(
    tmp_path: Path, kit: Any, request: pytest.FixtureRequest
) -> None:
    plan = kit.make_plan(10, 5)
    store = Store.create(tmp_path / "out", kit.make_manifest(plan), plan)
    store.start_attempt({})
    kit.finish_chunk(store, 0)
    store.close()
    request.getfixturevalue("new_column")
    store = Store.open(tmp_path / "out")
    store.start_attempt({})
    assert store.committed() == {0}
    kit.finish_chunk(store, 1)
    store.finish()
    assert "num_steps" not in kit.read_data(tmp_path / "out")[0]
