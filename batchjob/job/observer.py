"""The seam between a job and the process that supervises it: what the job reports, and which hints it gets.

`RunObserver` is for a job without a supervisor: it runs in the caller's process, handles its own signals and prints.
The worker of a supervisor has an observer of its own. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from batchjob.job.stop import StopSignals
from batchjob.spec import JobSpec

if TYPE_CHECKING:
    from pathlib import Path

    from batchjob.core.step_plan import StepPlan
    from batchjob.plan import Chunk
    from batchjob.report.progress import ProgressCounts
    from batchjob.report.result import RunResult
    from batchjob.store.store import Store

# The phases of an attempt. Only LOAD and RUN are timed: how long planning takes is for the input to say.
START, LOAD, RUN, END = "start", "load", "run", "end"


@dataclass(frozen=True, slots=True)
class RestartHints:
    """The lessons of earlier attempts of the same supervisor.

    `suspects` are groups of rows that were in flight when an engine came down. They run first, one group after the
    other, with nothing else in the engine. `poisoned` are rows that brought it down each time they ran alone, with how:
    they become row errors, once another row has shown that the engine works.
    """

    suspects: tuple[tuple[int, ...], ...] = ()
    poisoned: Mapping[int, str] = field(default_factory=dict)
    memory_backoff: int = 0  # how often the limits of the engine are halved: memory ran out
    restarts: int = 0
    last_end: str | None = None  # how the attempt before this one ended


def in_shard(spec: JobSpec, chunk_index: int) -> bool:
    """Returns whether a chunk is of the shard that `spec` asks for."""
    return chunk_index % spec.num_shards == spec.shard_id


@dataclass(frozen=True, slots=True)
class Team:
    """The workers that one command has, one for each device, as one of them sees it.

    Their shards are parts of the command's own, and they take each other's chunks. What a worker had claimed when it
    died stays with its device, whose next worker knows which of the rows are suspects; so the others do not die of
    them too. Only what a `lost` member had is free for all.
    """

    name: str  # no other command has it
    member: int  # which of the devices, from 0
    size: int  # number of devices
    asked: JobSpec  # the command's own spec, of which this worker has a part
    lost: set[int] = field(default_factory=set)  # members whose device gets no further worker

    def has(self, chunk_index: int) -> bool:
        """Returns whether a chunk is of the shard that the command was given."""
        return in_shard(self.asked, chunk_index)

    def may_take(self, chunk_index: int) -> bool:
        return self.asked.steal or self.has(chunk_index)

    def keeps(self, record: Mapping[str, Any] | None) -> bool:
        """Returns whether the claims of the attempt with this record are another member's, even if the attempt has
        ended."""
        theirs = (record or {}).get("team")
        if not isinstance(theirs, dict) or theirs.get("name") != self.name:
            return False
        return theirs.get("member") not in (self.member, *self.lost)

    def to_json(self) -> dict[str, Any]:
        """Returns the entry in an attempt's record."""
        return {"name": self.name, "member": self.member}


class RunObserver:
    """The observer of a job without a supervisor. A supervisor's worker overrides all of this."""

    hints: RestartHints = RestartHints()
    asked: JobSpec | None = None  # the command's spec, if it is not the job's
    team: Team | None = None  # if there are other workers

    @property
    def before_step(self) -> Callable[[StepPlan], None] | None:
        """Returns the function that gets every plan before it runs."""
        return None

    def stop(self, signals: StopSignals) -> StopSignals:
        """Returns what may end the run early. `signals` are this process's own, not yet in force."""
        return signals

    def attempt(self, name: str, directory: Path) -> None:
        """The attempt has a name now, and a directory for notes about it."""

    def phase(self, name: str) -> None:
        """A phase begins."""

    def share(self, chunks: Iterable[Chunk], committed: Collection[int] | None) -> None:
        """Gets the chunks of the job, and the indices of those that are committed; None: all."""

    def follow(self, counts: ProgressCounts) -> None:
        """Gets the running totals of this process, which change from here on."""

    def header(self, lines: Sequence[str], echo: Callable[[str], None]) -> None:
        """Prints the lines that a person sees before the first step: the engine first, then what holds for the job."""
        for line in lines:
            echo(line)

    def opened(self, chunk: Chunk, num_complete: int) -> None:
        """A chunk is opened here, of which so many rows are complete already."""

    def counted(self, store: Store) -> None:
        """The run has ended, and the store's counts are those that this process leaves behind."""

    def result(self, result: RunResult, echo: Callable[[str], None]) -> None:
        """Prints the summary."""
        echo(result.render())

    def finished(self, row_index: int) -> None:
        """Every sample of a row is in the store."""

    def alive(self, prompt_tokens: int, output_tokens: int) -> None:
        """The run has made progress just now: a step, a commit, new prompts. Gets the tokens of this attempt so far."""
