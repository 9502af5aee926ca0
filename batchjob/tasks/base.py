"""`Task`: the seam between the engine, which computes steps, and what a job wants to know of a row.

The engine schedules and runs steps. The task decides which requests it accepts, when a row is over, and what the
`Completion` of that row holds.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as ListLike
from typing import ClassVar, Protocol

from batchjob.core.sequence import Sequence
from batchjob.records import Completion, Request, RowError

NOT_FINITE = -1  # the token that a runner returns for a row whose logits are not finite numbers


class Detokenizer(Protocol):
    """Token ids to text. Special tokens are left out; nothing is stripped or cleaned up.

    Incomplete UTF-8 at the end of `ids` must decode to U+FFFD (what every byte-level and byte-fallback decoder does).
    `special_tokens` are the texts of the tokens that are left out unless `skip_special_tokens` is False.
    """

    @property
    def special_tokens(self) -> ListLike[str]: ...
    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str: ...


class TaskConfig(Protocol):
    """The part of an `EngineConfig` that a task reads."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    @property
    def unknown_token_ids(self) -> tuple[int, ...]: ...


class Task(Protocol):
    """One object per engine. The engine calls it from one thread."""

    name: ClassVar[str]

    def __init__(self, detokenizer: Detokenizer, config: TaskConfig) -> None: ...

    def add(self, request: Request, vocab_size: int) -> RowError | None:
        """Prepares for a request that is about to be queued, or returns why the task can never serve it."""
        ...

    def ended(self, sampled: Iterable[tuple[Sequence, int]]) -> list[tuple[Sequence, Completion]]:
        """Looks at the newest token of each unfinished sequence of a step, which is in `Sequence.tokens` already, and
        returns the sequences that are over. The engine frees their slots and blocks."""
        ...

    def forget(self, seq: Sequence) -> None:
        """Drops the state of a sequence that left the engine unfinished. A sequence without state is ignored."""
        ...
