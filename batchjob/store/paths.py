"""Names and places inside an output directory."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_PART = re.compile(r"part-(\d{8,})\.parquet")


@dataclass(frozen=True, slots=True)
class Layout:
    """The paths of one output directory:

    OUT/data/part-00000000.parquet    complete, immutable parts; nothing else, ever
    OUT/.batchjob/job.json            the manifest
    OUT/.batchjob/plan/00000.arrow    the plan; 00001.arrow and so on: its extensions
    OUT/.batchjob/wal/CHUNK/ATTEMPT.log, tmp/CHUNK.ATTEMPT, attempts/ATTEMPT.json, leases/, claims/,
    quarantine/, done.json

    No name under `.batchjob` ends in `.parquet`: readers that look into subdirectories would take it for data.
    """

    root: Path
    state_name: str = ".batchjob"

    @property
    def state(self) -> Path:
        return self.root / self.state_name

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def manifest(self) -> Path:
        return self.state / "job.json"

    @property
    def plan(self) -> Path:
        return self.extension(0)

    def extension(self, number: int) -> Path:
        """The plan of the files that the job was extended by for the `number`-th time; number 0 is the first plan."""
        return self.state / "plan" / f"{number:05d}.arrow"

    @property
    def wal(self) -> Path:
        return self.state / "wal"

    @property
    def tmp(self) -> Path:
        return self.state / "tmp"

    @property
    def attempts(self) -> Path:
        return self.state / "attempts"

    @property
    def leases(self) -> Path:
        return self.state / "leases"

    @property
    def claims(self) -> Path:
        return self.state / "claims"

    @property
    def quarantine(self) -> Path:
        return self.state / "quarantine"

    @property
    def done(self) -> Path:
        return self.state / "done.json"

    @property
    def directories(self) -> tuple[Path, ...]:
        """The directories inside the state directory that creation makes."""
        return (self.plan.parent, self.wal, self.tmp, self.attempts, self.leases, self.claims, self.quarantine)

    def part(self, chunk_index: int) -> Path:
        return self.data / f"part-{chunk_index:08d}.parquet"

    def chunk_wal(self, chunk_index: int) -> Path:
        return self.wal / f"{chunk_index:08d}"

    def attempt(self, attempt: str) -> Path:
        return self.attempts / f"{attempt}.json"

    def part_tmp(self, chunk_index: int, attempt: str, *, trial: int = 0) -> Path:
        return self.tmp / f"{chunk_index:08d}.{attempt}{f'.{trial}' if trial else ''}"


def chunk_of_part(name: str) -> int | None:
    """The chunk index in a part's file name; None for any other name."""
    match = _PART.fullmatch(name)
    return int(match[1]) if match else None
