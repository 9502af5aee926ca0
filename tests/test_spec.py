"""Settings as people write them."""

from __future__ import annotations

import pytest

from batchjob.errors import UsageError
from batchjob.spec import JobSpec, parse_memory


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GiB", 2**31), ("500MB", 5 * 10**8), ("1e9", 10**9), ("1.5k", 1500), ("64 KiB", 2**16), (None, None)],
)
def test_sizes_as_people_write_them(text: str | None, size: int | None) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["", "lots", "-1GB", "2 GiBB", "0"])
def test_a_size_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="kv-cache-memory"):
        parse_memory(text)
    with pytest.raises(UsageError, match="kv-cache-memory"):
        JobSpec(kv_cache_memory=text)
