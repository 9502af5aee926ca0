"""The seam between a job and whoever watches over it: what the job tells, and what it is told.

`Watcher` is nobody: the job runs in the caller's process and handles its own signals. The worker of a supervisor
brings its own. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from batchjob.job.stop_signals import StopSignals
from batchjob.spec import JobSpec

if TYPE_CHECKING:
    from pathlib import Path

    from batchjob.core.step_plan import StepPlan
    from batchjob.plan import Chunk
    from batchjob.report.progress import Counts
    from batchjob.report.result import RunResult
    from batchjob.store.store import Store

# The phases of an attempt. Only LOAD and RUN are timed: how long planning takes is for the input to say.
START, LOAD, RUN, END = "start", "load", "run", "end"


@dataclass(frozen=True, slots=True)
class Assignment:
    """What earlier attempts of the same supervisor taught.

    `suspects` are groups of rows that were in flight when an engine came down. They run first, one group after the
    other, with nothing else in the engine. `condemned` are rows that brought it down each time they ran alone, with
    how: they become row errors, once another row has shown that the engine works.
    """

    suspects: tuple[tuple[int, ...], ...] = ()
    condemned: Mapping[int, str] = field(default_factory=dict)
    halvings: int = 0  # how often the limits of the engine are halved: memory ran out
    restarts: int = 0
    last_end: str | None = None  # how the attempt before this one ended
    rows_finished: int = 0  # by the attempts before, as the next three
    prompt_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Team:
    """The workers that one command has on several devices, as one of them sees it.

    Their shards are parts of the command's own, and they take each other's chunks. What a worker had claimed when it
    died stays with its device, whose next worker knows which of the rows are suspects; so the others do not die of
    them too. Only what a `lost` member had is free for all.
    """

    name: str  # no other command has it
    member: int  # which of the devices, from 0
    asked: JobSpec  # what the command was given, before it was parted
    lost: set[int] = field(default_factory=set)  # members whose device gets no further worker

    def has(self, chunk_index: int) -> bool:
        """Whether a chunk is of the shard that the command was given."""
        return chunk_index % self.asked.num_shards == self.asked.shard_id

    def may_take(self, chunk_index: int) -> bool:
        return self.asked.steal or self.has(chunk_index)

    def keeps(self, record: Mapping[str, Any] | None) -> bool:
        """Whether what the attempt with this record has claimed is another member's, whatever became of the attempt."""
        theirs = (record or {}).get("team")
        if not isinstance(theirs, dict) or theirs.get("name") != self.name:
            return False
        return theirs.get("member") not in (self.member, *self.lost)

    def to_json(self) -> dict[str, Any]:
        """What an attempt's record keeps."""
        return {"name": self.name, "member": self.member}


class Watcher:
    """Nobody watches."""

    assignment: Assignment = Assignment()
    team: Team | None = None

    @property
    def before_step(self) -> Callable[[StepPlan], None] | None:
        """What gets every plan before it runs."""
        return None

    def stop(self, signals: StopSignals) -> StopSignals:
        """What may end the run early. `signals` are this process's own, not yet in force."""
        return signals

    def attempt(self, name: str, directory: Path) -> None:
        """The attempt has a name now, and a place for what is noted about it."""

    def phase(self, name: str) -> None:
        """A phase begins."""

    def share(self, chunks: Iterable[Chunk], committed: Collection[int] | None) -> None:
        """The chunks of the job, and the indices of those that are committed; None: all."""

    def follow(self, counts: Counts) -> None:
        """The running totals of this process, which change from here on."""

    def header(self, lines: Sequence[str], echo: Callable[[str], None]) -> None:
        """What a person is told before the first step: the engine first, then what holds for the job."""
        for line in lines[:1] if self.assignment.restarts else lines:
            echo(line)

    def opened(self, chunk: Chunk, num_complete: int) -> None:
        """A chunk is taken up here, of which so many rows were complete already."""

    def counted(self, store: Store) -> None:
        """The end: what the store counts now is what this process leaves behind."""

    def result(self, result: RunResult, echo: Callable[[str], None]) -> None:
        """What the run came to, for a person."""
        echo(result.render())

    def finished(self, row_index: int) -> None:
        """Every sample of a row is in the store."""

    def alive(self, prompt_tokens: int, output_tokens: int) -> None:
        """Something was achieved just now: a step, a commit, new prompts. With the tokens of this attempt so far."""
