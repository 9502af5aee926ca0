"""The README says which programs read OUTPUT/data: they do, half-way through a job and at its end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


def pandas_rows(data: Path) -> int:
    import pandas

    return len(pandas.read_parquet(data))


def pyarrow_rows(data: Path) -> int:
    import pyarrow.dataset

    return int(pyarrow.dataset.dataset(data).count_rows())


def duckdb_rows(data: Path) -> int:
    import duckdb

    row = duckdb.sql(f"select count(*), count(distinct row_index) from '{data}/*.parquet'").fetchall()[0]
    assert row[0] == row[1]
    return int(row[0])


def polars_rows(data: Path) -> int:
    import polars

    return int(polars.scan_parquet(data).select(polars.len()).collect().item())


def datasets_rows(data: Path) -> int:
    import datasets

    return len(datasets.load_dataset(str(data), split="train", cache_dir=str(data.parent.parent / "cache")))


READERS = [pandas_rows, pyarrow_rows, duckdb_rows, polars_rows, datasets_rows]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory, run_cli, data_dir: Path) -> dict[str, Path]:
    """One job of which only the first of two shards has run, and one that is complete."""
    base = tmp_path_factory.mktemp("readers")
    flags = ["--engine", "fake", "--input", data_dir / "gsm8k_64.jsonl", "--prompt", "question", "--chunk-rows", "8"]
    run_cli("run", *flags, "--output", base / "half", "--num-shards", "2", "--shard-id", "0")
    run_cli("run", *flags, "--output", base / "whole")
    return {"half": base / "half", "whole": base / "whole"}


@pytest.mark.parametrize("state", ["half", "whole"])
@pytest.mark.parametrize("read", READERS, ids=lambda read: read.__name__)
def test_a_reader_sees_exactly_the_rows_that_are_done(
    outputs: dict[str, Path], read: Callable[[Path], int], state: str
) -> None:
    assert read(outputs[state] / "data") == {"half": 32, "whole": 64}[state]
