"""Rows and carried columns of a chunk: the same whatever was read before, and nothing read twice without need."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchjob.errors import InputDataError, InputMissingError
from batchjob.inputs.formats import jsonl
from batchjob.inputs.planner import PlanResult
from batchjob.inputs.reader import InputReader

PlanOf = Callable[..., PlanResult]
WriteJsonl = Callable[[Path, Iterable[Any]], Path]
Write = Callable[[str, bytes], Path]
LINES = b"".join(b'{"a": %d, "b": "row %d"}\n' % (index, index) for index in range(200))


@pytest.fixture(params=["jsonl", "jsonl.gz", "jsonl.zst", "parquet"])
def result(request: pytest.FixtureRequest, tmp_path: Path, write: Write, plan_of: PlanOf) -> PlanResult:
    """200 rows {"a": i, "b": "row i"} in chunks of 7."""
    path = tmp_path / f"rows.{request.param}"
    if request.param == "parquet":
        data = {"a": list(range(200)), "b": [f"row {index}" for index in range(200)]}
        pq.write_table(pa.table(data), path, row_group_size=33)
    else:
        write(path.name, LINES)
    return plan_of(path, chunk_rows=7)


def test_chunks_read_the_same_in_any_order(result: PlanResult) -> None:
    chunks = list(result.plan.chunks)
    random.Random(1).shuffle(chunks)
    reader = InputReader(result.plan)
    for chunk in chunks:
        rows = list(range(chunk.row_index, chunk.row_index + chunk.num_rows))
        records = list(reader.rows(chunk, ["b", "zz"]))
        assert [(r.row_index, r.fields) for r in records] == [(i, {"b": f"row {i}"}) for i in rows]
        assert reader.carried(chunk).to_pydict() == {"a": rows, "b": [f"row {i}" for i in rows]}
    reader.close()


def test_rows_to_skip_keep_the_ordinals_of_the_others(result: PlanResult) -> None:
    chunk = result.plan.chunks[1]
    found = list(InputReader(result.plan).rows(chunk, ["a"], skip={7, 9, 13}))
    assert [(r.row_index, r.fields["a"]) for r in found] == [(8, 8), (10, 10), (11, 11), (12, 12)]


def test_a_read_given_up_half_way_does_not_shift_the_next_one(result: PlanResult) -> None:
    reader = InputReader(result.plan)
    rows = reader.rows(result.plan.chunks[0], ["a"])
    next(rows)
    rows.close()
    assert reader.carried(result.plan.chunks[1])["a"].to_pylist() == list(range(7, 14))
    assert [r.fields["a"] for r in reader.rows(result.plan.chunks[0], ["a"])] == list(range(7))


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_chunks_in_nearly_sorted_order_unpack_a_file_at_most_twice(
    write: Write, plan_of: PlanOf, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    result = plan_of(write(f"a.jsonl.{ending}", LINES), chunk_rows=7)
    opened: list[str] = []
    real = jsonl.iter_lines
    monkeypatch.setattr(jsonl, "iter_lines", lambda path, *a, **k: opened.append(path) or real(path, *a, **k))
    reader = InputReader(result.plan)
    order = [1, 0, 3, 2, 4, 6, 5, 7, 8, 10, 9]
    for index in order:
        assert reader.carried(result.plan.chunks[index])["a"].to_pylist()[0] == 7 * index
    assert len(opened) == 2


def test_a_column_past_what_one_arrow_array_holds_comes_in_several(
    write: Write, plan_of: PlanOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchjob.inputs.formats.row_format._CARRIED_BYTES", 100)  # of which 2 GiB would be the limit
    result = plan_of(write("a.jsonl", LINES), chunk_rows=50)
    table = InputReader(result.plan).carried(result.plan.chunks[1])
    assert table["b"].num_chunks > 5
    assert table["b"].to_pylist() == [f"row {index}" for index in range(50, 100)]


@pytest.mark.long
def test_more_than_2_gib_of_one_carried_column(tmp_path: Path, plan_of: PlanOf) -> None:
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        for index in range(45):
            file.write(b'{"a": %d, "b": "%s"}\n' % (index, b"x" * (50 << 20)))
    result = plan_of(path, chunk_rows=45)
    table = InputReader(result.plan).carried(result.plan.chunks[0])
    assert table.nbytes > 2 << 30
    assert table["a"].to_pylist() == list(range(45))


def test_row_groups_before_a_chunk_are_not_decoded(
    tmp_path: Path, plan_of: PlanOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": list(range(100))}), path, row_group_size=10)
    result = plan_of(path, chunk_rows=10)
    asked: list[list[int]] = []
    real = pq.ParquetFile.iter_batches

    def spy(self: pq.ParquetFile, size: int, *, row_groups: list[int], **options: Any) -> Any:
        asked.append(row_groups)
        return real(self, size, row_groups=row_groups, **options)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", spy)
    assert InputReader(result.plan).carried(result.plan.chunks[7])["a"].to_pylist() == list(range(70, 80))
    assert asked == [[7]]


def test_the_named_columns_alone_are_decoded(tmp_path: Path, plan_of: PlanOf) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": [1], "b": ["x"], "wide": ["y" * 1000]}), path)
    result = plan_of(path, keep_columns="a")
    chunk = result.plan.chunks[0]
    assert [dict(r.fields) for r in InputReader(result.plan).rows(chunk, ["b"])] == [{"b": "x"}]
    assert [dict(r.fields) for r in InputReader(result.plan).rows(chunk, [])] == [{}]
    assert InputReader(result.plan).carried(chunk).column_names == ["a"]


def test_bad_lines_keep_their_ordinals_and_carry_nulls(write: Write, plan_of: PlanOf) -> None:
    path = write("a.jsonl", b'{"a": 1}\n\nbroken\n{"a": 3}\n{"a": "' + b"x" * 50 + b'"}\n{"a": "\xff"}\n{"a": 6}')
    result = plan_of(path, max_row_bytes=40)
    assert (result.num_bad_rows, result.plan.num_rows) == (3, 6)
    assert "a.jsonl:3" in result.first_bad_row
    reader = InputReader(result.plan, max_row_bytes=40)
    (chunk,) = result.plan.chunks
    records = list(reader.rows(chunk, ["a"]))
    assert [(r.row_index, r.where[-2:], r.error.type if r.error else r.fields["a"]) for r in records] == [
        (0, ":1", 1),
        (1, ":3", "invalid_json"),
        (2, ":4", 3),
        (3, ":5", "row_too_large"),
        (4, ":6", "invalid_encoding"),
        (5, ":7", 6),
    ]
    assert all(r.error is None or r.where in r.error.message for r in records)
    assert reader.carried(chunk)["a"].to_pylist() == [1, None, 3, None, None, 6]


def test_json_columns_hold_what_was_written(write: Write, plan_of: PlanOf) -> None:
    path = write("a.jsonl", b'{"v": 7.0}\n{"v": "7"}\n{"v": null}\n{}\n{"v": [1,  2]}\n{"v": "\\ud800"}\n')
    result = plan_of(path)
    assert result.plan.columns["v"] == "json"
    (chunk,) = result.plan.chunks
    assert InputReader(result.plan).carried(chunk)["v"].to_pylist() == ["7.0", '"7"', None, None, "[1,  2]", '"\ufffd"']


def test_a_parquet_string_that_is_not_utf8_is_a_row_error(tmp_path: Path, plan_of: PlanOf) -> None:
    path = tmp_path / "a.parquet"
    bad = pa.Array.from_buffers(pa.string(), 2, pa.array([b"ok", b"caf\xe9"]).buffers())
    pq.write_table(pa.table({"p": bad}), path)
    result = plan_of(path)
    first, second = InputReader(result.plan).rows(result.plan.chunks[0], ["p"])
    assert (first.error, first.fields) == (None, {"p": "ok"})
    assert second.error is not None
    assert second.error.type == "invalid_encoding"
    assert "row 2" in second.error.message


def test_one_large_row_group_is_streamed(tmp_path: Path, plan_of: PlanOf) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"p": [f"{index:08d}" * 512 for index in range(16_000)]}), path, compression="none")
    assert pq.ParquetFile(path).num_row_groups == 1
    result = plan_of(path, chunk_rows=100)
    before = pa.total_allocated_bytes()
    pool = pa.default_memory_pool()
    reader = InputReader(result.plan)
    peak = 0
    for chunk in result.plan.chunks:
        for record in reader.rows(chunk, ["p"]):
            assert record.fields["p"].startswith(f"{record.row_index:08d}")
        peak = max(peak, pool.bytes_allocated() - before)
    reader.close()
    assert peak < 40 << 20 < path.stat().st_size


@pytest.mark.parametrize("change", ["append", "replace", "remove"])
def test_an_input_that_changes_during_the_run_is_exit_66(
    tmp_path: Path, write_jsonl: WriteJsonl, plan_of: PlanOf, change: str
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"a": index} for index in range(20)])
    result = plan_of(path, chunk_rows=10)
    reader = InputReader(result.plan)
    list(reader.rows(result.plan.chunks[0], None))
    if change == "append":
        with path.open("a") as file:
            file.write('{"a": 20}\n')
    elif change == "replace":
        path.write_text(path.read_text().replace('{"a": 3}', '{"a": 4}'))
    else:
        path.unlink()
    with pytest.raises(InputMissingError, match=r"a\.jsonl"):
        list(reader.rows(result.plan.chunks[1], None))
    with pytest.raises(InputMissingError, match=r"a\.jsonl"):
        reader.carried(result.plan.chunks[0])


def test_a_touched_input_is_read_with_one_warning(tmp_path: Path, write_jsonl: WriteJsonl, plan_of: PlanOf) -> None:
    import os

    path = write_jsonl(tmp_path / "a.jsonl", [{"a": index} for index in range(20)])
    result = plan_of(path, chunk_rows=10)
    os.utime(path, ns=(5, 5))
    reader = InputReader(result.plan)
    assert sum(len(list(reader.rows(chunk, None))) for chunk in result.plan.chunks) == 20
    assert len(reader.warnings) == 1


def test_damaged_pages_of_a_parquet_file_name_file_and_row(tmp_path: Path, plan_of: PlanOf) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"p": ["x" * 50 + str(i) for i in range(1000)]}), path, write_page_checksum=True)
    data = bytearray(path.read_bytes())
    data[200:260] = bytes(60)
    path.write_bytes(data)
    result = plan_of(path)
    with pytest.raises(InputDataError, match=r"a\.parquet.*row"):
        list(InputReader(result.plan).rows(result.plan.chunks[0], ["p"]))
