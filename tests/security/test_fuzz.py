"""Random damage to what is read: JSON Lines, Parquet, logs. Right rows, row errors or an error of one line; no more."""

from __future__ import annotations

import gzip
import io
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchjob.errors import InputDataError
from batchjob.inputs.formats import jsonl
from batchjob.inputs.planner import make_plan
from batchjob.inputs.streams import iter_lines
from batchjob.records import ROW_ERROR_TYPES, Completion, RowError
from batchjob.spec import JobSpec
from batchjob.store import wal
from batchjob.store.columns import OutputColumns

json_values: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
pieces = st.sampled_from(
    [
        *(b'{"a": 1}', b'{"a": 1, "a": 2}', b'{"prompt": "x"}', b"NaN", b"1e999", b"9" * 5000, b"null"),
        *(b"{", b"}", b"[", b"]", b'"', b",", b":", b" ", b"\\", b"\\ud800", b"\\udc00"),
        *(b"\n", b"\r\n", b"\0", b"\xff", b"\xef\xbb\xbf", b"\xe2\x80\xa8"),
    ]
)
SLOW = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


@given(
    raw=st.binary() | st.lists(pieces, max_size=12).map(b"".join) | json_values.map(lambda v: json.dumps(v).encode())
)
@settings(max_examples=400, suppress_health_check=SLOW)
def test_a_line_is_a_row_or_says_why_not(raw: bytes) -> None:
    row, error = jsonl.parse_row(raw)
    assert (row is not None) or (error is not None)
    if error is not None:
        assert error.type in ROW_ERROR_TYPES
        error.message.encode()
    if row is not None and error is None:
        assert json.loads(raw) == row
        for name, text in jsonl.raw_values(raw.decode(), list(row)).items():
            assert json.loads(text) == row[name]
            text.encode()


@given(
    data=st.lists(pieces | st.binary(max_size=40), max_size=30).map(b"".join),
    compression=st.sampled_from(["", "gz", "cut gz"]),
    limit=st.integers(1, 300),
)
@settings(max_examples=300, suppress_health_check=SLOW)
def test_lines_of_any_bytes(tmp_path: Path, data: bytes, compression: str, limit: int) -> None:
    path = tmp_path / "rows"
    packed = gzip.compress(data)
    path.write_bytes({"": data, "gz": packed, "cut gz": packed[: len(packed) // 2]}[compression])
    last = 0
    for _, line, raw in iter_lines(str(path), compression[-2:], max_line_bytes=limit):
        assert line > last
        last = line
        if isinstance(raw, RowError):
            assert raw.type in ("row_too_large", "input_damaged")
        else:
            assert 0 < len(raw) <= limit
            assert b"\n" not in raw


def log_of(number: int) -> bytes:
    columns = OutputColumns(["output_token_ids"])
    samples = [Completion(i, 0, 3, [i], f"text {i} é", "stop") for i in range(number)]
    return b"".join(wal.frame(columns.encode(sample, 1)) for sample in samples)


@given(
    number=st.integers(0, 8),
    edits=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 20), st.binary(max_size=20)), max_size=5),
)
@settings(max_examples=500, suppress_health_check=SLOW)
def test_no_damage_to_a_log_gives_a_record_that_was_not_written(
    number: int, edits: list[tuple[float, int, bytes]]
) -> None:
    data = log_of(number)
    good = {payload for _, payload in wal.LogScan(io.BytesIO(data))}
    assert len(good) == number
    for place, drop, insert in edits:
        at = int(place * len(data))
        data = data[:at] + insert + data[at + drop :]
    for offset, payload in wal.LogScan(io.BytesIO(data)):
        assert payload in good
        assert data[offset + wal.HEADER_LEN :].startswith(payload)


@given(payloads=st.lists(json_values.map(lambda v: json.dumps(v).encode()) | st.binary(max_size=30), max_size=6))
@settings(max_examples=300, suppress_health_check=SLOW)
def test_payloads_of_any_kind_are_objects_or_nothing(payloads: list[bytes]) -> None:
    records = wal.parse_payloads(payloads)
    assert len(records) == len(payloads)
    assert all(record is None or isinstance(record, dict) for record in records)


# pyarrow's reader is C++: it runs in a process of its own, which must not die of what it reads.
READ_DAMAGED = """
import os, random, resource, sys
from pathlib import Path
from batchjob.errors import BatchJobError
from batchjob.inputs.formats import parquet, parquet_footers
from batchjob.inputs.planner import make_plan
from batchjob.inputs.reader import InputReader
from batchjob.spec import JobSpec

good, place, seed, number = Path(sys.argv[1]).read_bytes(), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
rng = random.Random(seed)
kinds = {"refused": 0, "read": 0}

def check_footers(paths):
    # As the real one, in a fork: a fresh interpreter for each of a thousand files would take minutes.
    pid = os.fork()
    if pid == 0:
        os.close(2)
        parquet_footers.look(paths[0])
        os._exit(0)
    if os.waitpid(pid, 0)[1]:
        raise BatchJobError("its footer is damaged")

parquet.check_footers = check_footers
for trial in range(number):
    data = bytearray(good)
    for _ in range(rng.choice([1, 1, 2, 8])):
        # Half of the hits go to the footer, which is a small part of the file.
        at = rng.randrange(max(0, len(data) - 1500), len(data)) if rng.random() < 0.5 else rng.randrange(len(data))
        data[at] = rng.randrange(256)
    if rng.random() < 0.1:
        del data[rng.randrange(len(data)) :]
    place.write_bytes(bytes(data))
    try:
        plan = make_plan(JobSpec(input=(str(place),))).plan
        reader = InputReader(plan)
        for chunk in plan.chunks:
            records = list(reader.rows(chunk, None))
            assert len(records) == chunk.num_rows
            assert reader.carried(chunk).num_rows == chunk.num_rows
        reader.close()
        kinds["read"] += 1
    except BatchJobError:
        kinds["refused"] += 1
print(kinds["refused"], kinds["read"])
"""


def read_damaged(tmp_path: Path, *, seed: int, number: int) -> tuple[int, int]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = random.Random(seed)
    table = pa.table(
        {
            "prompt": [f"row {i} {rng.random()}" for i in range(60)],
            "messages": [[{"role": "user", "content": f"hi {i}"}] for i in range(60)],
            "when": pa.array([i * 10**9 for i in range(60)], pa.timestamp("ns")),
            "price": pa.array(list(range(60))).cast(pa.decimal128(30, 2)),
        }
    )
    good = tmp_path / "good.parquet"
    pq.write_table(
        table, good, row_group_size=25, write_page_checksum=True, compression=rng.choice(["zstd", "snappy", "none"])
    )
    command = [sys.executable, "-c", READ_DAMAGED, str(good), str(tmp_path / "damaged.parquet"), str(seed), str(number)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"seed {seed}: {done.stderr[-3000:]}"
    refused, read = map(int, done.stdout.split())
    return refused, read


def test_damaged_parquet_is_refused_or_read(tmp_path: Path) -> None:
    refused, read = read_damaged(tmp_path, seed=1, number=150)
    assert refused + read == 150
    assert refused > 50


def test_a_footer_that_brings_pyarrow_down_is_refused_by_name(tmp_path: Path) -> None:
    """A histogram of levels that is longer than the schema allows: the length of its list is one byte of the footer."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    good, bad = tmp_path / "a-good.parquet", tmp_path / "b-bad.parquet"
    pq.write_table(pa.table({"messages": [[{"role": "user", "content": "hi"}]] * 9, "prompt": ["x"] * 9}), good)
    data = good.read_bytes()
    fatal = 0
    for at in range(len(data) - 8 - int.from_bytes(data[-8:-4], "little"), len(data) - 8):
        if data[at] in (0x16, 0x36, 0x46, 0x56):  # a short list of 64-bit integers, with its length in the high half
            bad.write_bytes(data[:at] + bytes([0x26 if data[at] != 0x26 else 0x36]) + data[at + 1 :])
            done = subprocess.run([sys.executable, "-c", LOOK, str(bad)], capture_output=True, check=False)
            if done.returncode < 0:
                fatal += 1
                with pytest.raises(InputDataError, match=r"b-bad\.parquet.*footer is damaged"):
                    make_plan(JobSpec(input=(str(good), str(bad))))
                break
    assert fatal or pa.__version__ != TESTED, "the damage of which this pyarrow dies is another one now"


LOOK = "import sys; from batchjob.inputs.formats.parquet_footers import look; look(sys.argv[1])"
TESTED = "26.0.1"


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(2, 22))
def test_much_damaged_parquet_is_refused_or_read(tmp_path: Path, seed: int) -> None:
    assert sum(read_damaged(tmp_path, seed=seed, number=1000)) == 1000
