"""Log records: what is written comes back, and no damage to a log gives a wrong row."""

from __future__ import annotations

import io
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchjob.records import Completion, RowError
from batchjob.store import wal
from batchjob.store.columns import OutputColumns

WITH_TOKEN_IDS = OutputColumns(["output_token_ids"])


def scan(data: bytes) -> tuple[list[bytes], wal.LogScan]:
    found = wal.LogScan(io.BytesIO(data))
    return [payload for _, payload in found], found


def payloads(number: int) -> list[bytes]:
    return [WITH_TOKEN_IDS.encode(Completion(i, 0, 1, [i], f"é{i}\u2028\U0001f642", "stop"), 1) for i in range(number)]


text = st.text(alphabet=st.characters(exclude_categories=()))


@given(
    output=st.none() | text,
    token_ids=st.lists(st.integers(0, 2**31 - 1)),
    error=st.none() | st.builds(RowError, type=st.sampled_from(["invalid_json", "engine_error"]), message=text),
    reason=st.sampled_from(["stop", "length", None]),
)
def test_a_record_holds_what_was_generated(
    output: str | None, token_ids: list[int], error: RowError | None, reason: str | None
) -> None:
    done = Completion(2**40, 3, 17, token_ids, output, reason, error)
    payload = WITH_TOKEN_IDS.encode(done, 4)
    assert b"\n" not in payload
    found, _ = scan(wal.frame(payload))
    assert found == [payload]
    (record,) = wal.parse_payloads(found)
    assert record is not None
    assert (record["row"], record["sample"], record["of"]) == (2**40, 3, 4)
    assert (record["prompt_tokens"], record["output_tokens"]) == (17, len(token_ids))
    assert record["token_ids"] == token_ids
    assert record["finish"] == reason
    assert record["text"] == repaired(output)
    assert record.get("error") == (None if error is None else [error.type, repaired(error.message)])


def repaired(value: str | None) -> str | None:
    """Halves of surrogate pairs, which UTF-8 cannot hold, become U+FFFD."""
    return value and value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def test_half_a_surrogate_pair_becomes_the_replacement_character() -> None:
    payload = OutputColumns().encode(Completion(0, 0, 1, [], "a\ud83db\U0001f642", "stop"), 1)
    assert json.loads(payload)["text"] == "a\ufffdb\U0001f642"


def test_a_log_cut_anywhere_in_its_last_record_keeps_all_before() -> None:
    records = [wal.frame(payload) for payload in payloads(3)]
    whole = b"".join(records)
    start = len(whole) - len(records[-1])
    for cut in range(start, len(whole)):
        found, log = scan(whole[:cut])
        if cut == len(whole) - 1:  # all but the newline: whole
            assert (found, log.num_torn) == (payloads(3), 0)
        else:
            assert (found, log.num_torn) == (payloads(2), 1 if cut > start else 0), cut
        assert log.num_bad == 0


@pytest.mark.parametrize("tail", [b"\0" * 50, b"\0" * 5000, b"garbage", b"\xff\xfe", b"00000000 {}"])
def test_a_damaged_tail_is_passed_over(tail: bytes) -> None:
    whole = b"".join(wal.frame(payload) for payload in payloads(3))
    found, log = scan(whole + tail)
    assert (found, log.num_torn, log.num_bad) == (payloads(3), 1, 0)


def test_reading_goes_on_at_the_newline_after_damage() -> None:
    first, second, third, last = (wal.frame(payload) for payload in payloads(4))
    glued = first + second[: len(second) // 2] + third + b"\0\0\0\n\n" + b"x" * 300 + b"\n" + last
    found, log = scan(glued)
    assert found == [payloads(4)[0], payloads(4)[3]]
    assert (log.num_bad, log.num_torn) == (4, 0)


def test_no_changed_byte_gives_another_record() -> None:
    records = [wal.frame(payload) for payload in payloads(3)]
    whole = b"".join(records)
    rng = random.Random(1)
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << rng.randrange(8)
        found, _ = scan(bytes(damaged))
        assert set(found) <= set(payloads(3))
        assert len(found) >= 1  # the damage of one byte reaches two records at most, where it takes a newline


def test_offsets_are_those_of_records_whatever_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = b"junk\n" + b"".join(wal.frame(payload) for payload in payloads(5)) + b"torn"
    for block in (1, 7, 64, 1 << 20):
        monkeypatch.setattr(wal, "_BLOCK_BYTES", block)
        found = wal.LogScan(io.BytesIO(whole))
        for offset, payload in found:
            assert wal.unframe(whole[offset : offset + wal.HEADER_LEN + len(payload)]) == payload
        assert (found.num_bad, found.num_torn) == (1, 1)


def test_payloads_that_are_no_objects_do_not_shift_the_others() -> None:
    assert wal.parse_payloads([b'{"a":1}', b"[1]", b"{", b'{"b":2}', b"1],[2"]) == [
        {"a": 1},
        None,
        None,
        {"b": 2},
        None,
    ]
    assert wal.parse_payloads([b"1,2", b'{"a":1}']) == [None, {"a": 1}]
    assert wal.parse_payloads([]) == []
