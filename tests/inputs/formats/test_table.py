"""A format is one class and one line in the table: planning, reading, resuming and the store know no format by name."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

from batchjob.errors import InputDataError
from batchjob.inputs.digests import RawRow
from batchjob.inputs.formats.jsonl import Jsonl
from batchjob.inputs.formats.row_format import Parsed, RowFormat
from batchjob.inputs.formats.table import FORMATS
from batchjob.inputs.planner import make_plan
from batchjob.inputs.reader import InputReader
from batchjob.inputs.streams import iter_lines
from batchjob.records import RowError
from batchjob.spec import JobSpec


class Pairs(RowFormat):
    """One row a line, as in `name=a size=3`."""

    name = "pairs"
    title = "Pairs"
    endings = (".pairs",)
    row_noun = "a line of pairs"
    advice = "Leave the file out"

    def raw_rows(
        self, path: str, compression: str, *, offset: int = 0, line: int = 1, max_row_bytes: int
    ) -> Generator[RawRow, None, None]:
        return iter_lines(path, compression, offset=offset, line=line, max_line_bytes=max_row_bytes)

    def parse(self, raw: bytes) -> Parsed:
        try:
            pairs = [pair.split("=") for pair in raw.decode().split()]
            return {name: int(value) if value.isdecimal() else value for name, value in pairs}, None
        except ValueError:
            return None, RowError("invalid_json", "no pairs")


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, "pairs", Pairs())


@pytest.mark.usefixtures("pairs")
def test_a_format_in_the_table_is_planned_and_read_from_any_row(tmp_path: Path) -> None:
    path = tmp_path / "a.pairs"
    rows = [{"name": f"n{i}", "size": i, "mixed": i if i % 2 else "x"} for i in range(50)]
    lines = [" ".join(f"{name}={value}" for name, value in row.items()) for row in rows]
    path.write_text("\n".join([*lines[:20], "broken", *lines[20:]]))
    result = make_plan(JobSpec(input=(str(path),), chunk_rows=7))
    assert (result.plan.files[0].format, result.plan.num_rows, result.num_bad_rows) == ("pairs", 51, 1)
    assert dict(result.plan.columns) == {"name": "string", "size": "int64", "mixed": "json"}
    rows.insert(20, {})
    for chunk in reversed(result.plan.chunks):
        reader = InputReader(result.plan)
        wanted = rows[chunk.row_index : chunk.row_index + chunk.num_rows]
        assert [record.fields for record in reader.rows(chunk, None)] == wanted
        carried = reader.carried(chunk).to_pylist()
        assert [row["size"] for row in carried] == [row.get("size") for row in wanted]
        texts = {"x": '"x"', None: None}
        assert [row["mixed"] for row in carried] == [texts.get(v := row.get("mixed"), str(v)) for row in wanted]
        reader.close()


@pytest.mark.usefixtures("pairs")
def test_formats_do_not_mix(tmp_path: Path) -> None:
    (tmp_path / "a.pairs").write_text("a=1\n")
    (tmp_path / "b.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(InputDataError, match=r"mix JSONL \(.*b\.jsonl\) and Pairs \(.*a\.pairs\)"):
        make_plan(JobSpec(input=(str(tmp_path / "a.pairs"), str(tmp_path / "b.jsonl"))))


def test_names_and_endings_are_told_apart() -> None:
    assert all(name == format.name for name, format in FORMATS.items())
    endings = [ending for format in FORMATS.values() for ending in format.endings]
    assert len(set(endings)) == len(endings)
    assert isinstance(FORMATS["jsonl"], Jsonl)
