"""The removal of files that no process needs: temporary files and claims of dead attempts, logs of committed chunks."""

from __future__ import annotations

import re
from collections.abc import Collection

from batchjob.store.claims import claim_name
from batchjob.store.context import StoreContext
from batchjob.store.publish import sweep_claims

_TRIAL = re.compile(r"\.\d+$")


def sweep(context: StoreContext, committed: Collection[int], *, is_finished: bool = False) -> None:
    """Removes the temporary files and claims of attempts that are known to be dead, and the logs of `committed` chunks.

    With `is_finished` also the temporary files of committed chunks, which no process can use any more, where it cannot
    be told from here whether their attempts live. Raises OSError.
    """
    _sweep_tmp(context, committed if is_finished else ())
    _sweep_wal(context, committed)
    names = {name for index in committed for name in (context.layout.part(index).name, claim_name(index))}
    sweep_claims(context.fs, context.layout.claims, names, is_dead=context.is_dead)


def _sweep_tmp(context: StoreContext, published: Collection[int]) -> None:
    """Removes temporary files; their names are PURPOSE.ATTEMPT[.TRIAL]."""
    fs, tmp = context.fs, context.layout.tmp
    for name in fs.listdir(tmp):
        purpose, _, attempt = name.partition(".")
        attempt = _TRIAL.sub("", attempt)
        late = purpose.isdigit() and int(purpose) in published
        if attempt and (late or context.is_dead(attempt)):
            fs.unlink_if_there(tmp / name)


def _sweep_wal(context: StoreContext, committed: Collection[int]) -> None:
    """Removes the logs that a crash left between the publishing of a part and their removal."""
    names = context.fs.listdir(context.layout.wal)
    stale = [index for name in names if name.isdigit() and (index := int(name)) in committed]
    if stale:
        # The process that published those parts may have died before this, and their names must be durable first.
        context.fs.fsync_dir(context.layout.data)
    for index in stale:
        context.remove_wal(index)
