"""The seam between a job and whoever watches over it: what the job tells, and what it is told.

`Watcher` is nobody: the job runs in the caller's process and handles its own signals. The worker of a supervisor
brings its own. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from batchjob.signals import StopSignals

if TYPE_CHECKING:
    from pathlib import Path

    from batchjob.core.plan import StepPlan

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


class Watcher:
    """Nobody watches."""

    assignment: Assignment = Assignment()

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

    def finished(self, row_index: int) -> None:
        """Every sample of a row is in the store."""

    def alive(self, prompt_tokens: int, output_tokens: int) -> None:
        """Something was achieved just now: a step, a commit, new prompts. With the tokens of this attempt so far."""
