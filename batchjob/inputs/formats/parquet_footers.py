"""Looks at Parquet footers in a process that may die of it.

Some damage to a footer (histograms whose length does not fit the schema) makes pyarrow end the process instead of
raising an error. A footer that this process has survived is safe to read in one that matters.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

from batchjob.errors import InputDataError


def check_footers(paths: Sequence[str]) -> None:
    """Raises InputDataError naming the first file whose footer ends pyarrow. Other damage is found by reading."""
    done = subprocess.run(
        [sys.executable, "-m", "batchjob.inputs.formats.parquet_footers"],
        input=b"\0".join(os.fsencode(path) for path in paths),
        capture_output=True,
        check=False,
    )
    if done.returncode < 0:
        path = paths[done.stdout.count(b".") - 1]
        raise InputDataError(f"{path} cannot be read as Parquet: its footer is damaged")


def look(path: str) -> None:
    """Every column of every row group, as a reader asks for them."""
    import pyarrow.parquet as pq

    with suppress(Exception):  # which the reader will meet again, and report
        metadata = pq.read_metadata(path)
        for group in range(metadata.num_row_groups):
            row_group = metadata.row_group(group)
            for column in range(row_group.num_columns):
                row_group.column(column)


def main() -> None:
    for path in sys.stdin.buffer.read().split(b"\0"):
        os.write(1, b".")
        look(os.fsdecode(path))


if __name__ == "__main__":
    main()
