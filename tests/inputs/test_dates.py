"""Dates that Python cannot hold, machines without pandas or a database of zones: all is carried, and can be used."""

from __future__ import annotations

import datetime as dt
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchjob.inputs.planner import PlanResult
from batchjob.inputs.reader import InputReader
from batchjob.records import Record

PlanOf = Callable[..., PlanResult]
ReadAll = Callable[..., list[Record]]
FAR = 253402300799 * 10**6  # 9999-12-31 23:59:59
US = pa.timestamp("us")


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (FAR, pa.timestamp("us", "Asia/Tokyo"), "9999-12-31T23:59:59.000000Z"),
        (FAR * 4, US, "+034089-12-29T23:59:56"),
        (-FAR, US, "-"),
        (1, pa.timestamp("ns", "Mars/Phobos"), "1970-01-01T00:00:00.000000001Z"),
        (1, pa.timestamp("ns"), "1970-01-01T00:00:00.000000001"),
        (2**62, pa.duration("s"), "PT4611686018427387904S"),
    ],
)
def test_any_date_is_carried_and_can_be_used(
    tmp_path: Path, plan_of: PlanOf, read_all: ReadAll, value: int, kind: pa.DataType, text: str
) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": ["a", "b"], "at": pa.array([value, None], pa.int64()).view(kind)}), path)
    result = plan_of(path)
    first, second = read_all(result, ["prompt", "at"])
    assert first.error is second.error is None
    assert first.fields["at"].startswith(text)
    reader = InputReader(result.plan)
    assert reader.carried(result.plan.chunks[0]).column("at").equals(pq.read_table(path).column("at"))


def test_int96_dates_keep_their_years(tmp_path: Path, plan_of: PlanOf, carried_all: Any) -> None:
    times = [dt.datetime(9999, 12, 31, 23, 59, 59, 999999), dt.datetime(1066, 10, 14), None, dt.datetime(2024, 2, 29)]
    table = pa.table({"at": pa.array(times, US), "in": pa.array([[at] for at in times], pa.list_(US))})
    pq.write_table(table, tmp_path / "a.parquet", use_deprecated_int96_timestamps=True)
    assert carried_all(plan_of(tmp_path / "a.parquet")) == [{"at": at, "in": [at]} for at in times]


PROGRAM = """
import sys
sys.path = [path for path in sys.path if not path.endswith("stubs")]  # pandas itself
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Blocker())
import zoneinfo
zoneinfo.reset_tzpath([])
from batchjob.inputs.planner import make_plan
from batchjob.inputs.reader import InputReader
from batchjob.spec import JobSpec
plan = make_plan(JobSpec(input=({path!r},))).plan
reader = InputReader(plan)
print([dict(row.fields) for row in reader.rows(plan.chunks[0], None)], reader.carried(plan.chunks[0]).num_rows)
"""


def test_values_are_the_same_without_pandas_and_without_zones(tmp_path: Path) -> None:
    path = str(tmp_path / "a.parquet")
    values = pa.array([10**15, None, 10**15 + 1], pa.int64())
    kinds = {"ns": pa.timestamp("ns"), "zoned": pa.timestamp("ns", "Europe/Berlin"), "for": pa.duration("ns")}
    pq.write_table(pa.table({name: values.view(kind) for name, kind in kinds.items()}), path)
    outputs = set()
    for blocked in ([], ["pandas", "pytz", "tzdata"]):
        code = PROGRAM.format(blocked=blocked, path=path)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        outputs.add(done.stdout)
    assert len(outputs) == 1
    assert outputs.pop().endswith("] 3\n")
