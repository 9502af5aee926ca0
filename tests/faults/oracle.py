"""The result that a job on the fake engine must have, worked out from its input without a line of batchjob.

`Oracle` reads the input files itself and knows how the fake engine answers (see the docstrings of
`batchjob/engine/fake.py` and `batchjob/records.py`): the words of an answer follow from SplitMix64, seeded with the
row's stream and prompt. It then holds parts and logs against that.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet

_MASK = (1 << 64) - 1
_SYLLABLES = (
    "ba be bi bo da de di do ka ke ki ko ma me mi mo".split(),
    "l n r s t la na ra sa ta le ne re se te li".split(),
)
WORDS = [start + end for start in _SYLLABLES[0] for end in _SYLLABLES[1]]
CARRIED = ("n", "name", "meta", "params")
Key = tuple[int, int]  # row and sample


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of one sample: text, reason and tokens, or the type of an error."""

    text: str | None
    finish: str | None
    prompt_tokens: int
    output_tokens: int
    error: str | None = None


@dataclass(slots=True)
class Oracle:
    """`flags` are those settings of the job that its answers depend on: n, seed, max_tokens."""

    files: list[Path]
    n: int = 1
    seed: int = 0
    max_tokens: int | None = None
    expected: dict[Key, Answer] = field(default_factory=dict)
    carried: dict[int, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.read()

    def read(self) -> None:
        """Also when a file has come behind the others."""
        self.expected, self.carried = {}, {}
        for row, values in enumerate(row for path in self.files for row in rows_of_input(path)):
            self.carried[row] = {name: (values or {}).get(name) for name in CARRIED}
            params, error = self._params(values)
            for sample in range(params["n"]):
                self.expected[row, sample] = (
                    Answer(None, None, 0, 0, error)
                    if error is not None
                    else self._answer(row, sample, (values or {})["prompt"], params)
                )

    def _params(self, values: Mapping[str, Any] | None) -> tuple[dict[str, Any], str | None]:
        own = {"n": self.n, "seed": None, "max_tokens": self.max_tokens, "min_tokens": 0, "ignore_eos": False}
        if values is None:
            return own, "invalid_json"
        given = values.get("params") or {}
        if not set(given) <= set(own):
            return own, "invalid_params"
        if given.get("min_tokens", 0) > (given.get("max_tokens") or self.max_tokens or 10**9):
            return own, "invalid_params"
        own.update(given)
        return own, None if isinstance(values.get("prompt"), str) else "invalid_prompt"

    def _answer(self, row: int, sample: int, prompt: str, params: Mapping[str, Any]) -> Answer:
        tokens = [1, *map(token_of, prompt.split(" "))]
        seed = params["seed"]
        parts = ("job", self.seed, row, sample) if seed is None else ("row", seed, sample)
        stream = int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")
        state = mix(stream ^ (zlib.crc32(array("q", tokens)) << 16))
        num_words = 64 if params["ignore_eos"] else max(1 + state % 6, params["min_tokens"])
        words: list[str] = []
        while len(words) < num_words:
            state = mix(state)
            words += [WORDS[byte] for byte in state.to_bytes(8, "little")]
        words = words[:num_words]
        limit = params["max_tokens"]
        if params["ignore_eos"]:
            assert limit is not None
            words = (words * (limit // len(words) + 1))[:limit]
        elif limit is None or len(words) < limit:
            return Answer(" ".join(words), "stop", len(tokens), len(words) + 1)
        return Answer(" ".join(words[:limit]), "length", len(tokens), limit)

    # -- what lies in an output directory

    def finished(self, output: Path) -> tuple[dict[Key, str | None], set[Key]]:
        """Text of every finished sample, from logs and parts; and those that more than one process has logged.

        Others may be at work: logs are read first, since their rows move on into parts. Every one is held against what
        is expected.
        """
        found: dict[Key, str | None] = {}
        logs: dict[Key, set[str]] = {}
        for path in sorted((output / ".batchjob" / "wal").glob("*/*.log")):
            for record in records_of_log(path):
                key = (record["row"], record["sample"])
                error = record["error"][0] if "error" in record else None
                self._compare(key, record["text"], error, f"{path}")
                found.setdefault(key, record["text"])
                logs.setdefault(key, set()).add(path.name)
        for path in parts_of(output):
            for row in pyarrow.parquet.read_table(path).to_pylist():
                key = (row["row_index"], row["sample_index"])
                self._compare(key, row["output"], row["error_type"], f"{path}")
                found[key] = row["output"]
        return found, {key for key, names in logs.items() if len(names) > 1}

    def _compare(self, key: Key, text: str | None, error: str | None, where: str) -> None:
        answer = self.expected[key]
        assert (text, error) == (answer.text, answer.error), f"{where}: {key} is {text!r} ({error}), not {answer}"

    def check_complete(self, output: Path, *, is_tidy: bool = True) -> None:
        """Every sample once, in the input's order, right in each column; a job that calls itself complete. It is not
        tidy where files could not be removed."""
        rows = [row for path in parts_of(output) for row in pyarrow.parquet.read_table(path).to_pylist()]
        assert [(row["row_index"], row["sample_index"]) for row in rows] == list(self.expected)
        for row in rows:
            answer = self.expected[row["row_index"], row["sample_index"]]
            assert row["status"] == ("ok" if answer.error is None else "error"), row
            assert (
                Answer(
                    row["output"],
                    row["finish_reason"],
                    row["num_prompt_tokens"] if answer.error is None else 0,
                    row["num_output_tokens"],
                    row["error_type"],
                )
                == answer
            ), row
            for name, value in self.carried[row["row_index"]].items():
                there = row[name]
                if isinstance(there, str) and value is not None and not isinstance(value, str):
                    there = json.loads(there)
                assert there == value, (name, there, value, row)
        done = json.loads((output / ".batchjob" / "done.json").read_text())
        assert done["num_rows"] == len(self.carried)
        for name in ("wal", "claims", "quarantine") if is_tidy else ():
            assert [path.name for path in (output / ".batchjob" / name).iterdir()] == []


def mix(state: int) -> int:
    """SplitMix64."""
    state = (state + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def token_of(word: str) -> int:
    if word in WORDS:
        return 4 + WORDS.index(word)
    return 260 + zlib.crc32(word.encode()) % (65_536 - 260)


def rows_of_input(path: Path) -> Iterator[dict[str, Any] | None]:
    """Its rows; None for a line that is no JSON object."""
    if path.suffix == ".parquet":
        for row in pyarrow.parquet.read_table(path).to_pylist():
            yield {
                name: json.loads(value) if name in ("meta", "params") and value else value
                for name, value in row.items()
            }
        return
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = zlib.decompress(data, 31)
    for line in data.split(b"\n"):
        if line:
            try:
                yield json.loads(line)
            except ValueError:
                yield None


def parts_of(output: Path) -> list[Path]:
    data = output / "data"
    return sorted(data.iterdir()) if data.is_dir() else []


def records_of_log(path: Path) -> Iterator[dict[str, Any]]:
    """Records of finished samples that are whole; a log may be gone, or grow."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return
    for line in lines:
        if line[:8] == b"%08x" % zlib.crc32(line[9:]):
            record = json.loads(line[9:])
            if "text" in record:
                yield record
