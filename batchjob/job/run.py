"""`run`: one call from a `JobSpec` to finished rows, in a new output directory or in the one that is there.

What a run does in order: it opens the job, takes the chunks that are left, loads the engine, runs the loop over them,
and counts what the output directory holds.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

from batchjob import __version__
from batchjob.errors import UsageError
from batchjob.job.chunk_source import OwnChunks, SharedChunks
from batchjob.job.devices import only_device
from batchjob.job.disk_space import expected_bytes, space_warning
from batchjob.job.header import header_lines, model_line, show_first_prompt, unknown_tokens_warning
from batchjob.job.observer import END, LOAD, RUN, RestartHints, RunObserver
from batchjob.job.open import RunState, open_job
from batchjob.job.stop import requeue, stop_signals, time_limit
from batchjob.plan import Chunk
from batchjob.report import console
from batchjob.report.progress import ProgressCounts
from batchjob.report.result import RunResult
from batchjob.slurm import SlurmTask
from batchjob.spec import JobSpec, spec_fields
from batchjob.store.lease import NoLease


def run(spec: JobSpec, *, echo: Callable[[str], None] | None = None, observer: RunObserver | None = None) -> RunResult:
    """Runs the job, or what is left of it, in this process. `echo` gets the lines for a person; the default prints them
    to stderr. `observer` follows the run for a supervisor.

    Row errors do not raise; see `RunResult`. Raises a BatchJobError, whose `exit_code` is that of the command line.
    """
    echo, observer = echo or console.echo, observer or RunObserver()
    if not spec.output:
        raise UsageError("give --output: the directory that the rows go to")
    if not spec.input:
        raise UsageError("give --input: a JSONL or Parquet file, a directory or a glob")
    if (too_many := only_device(spec)[1]) is not None:
        echo(too_many)
    task = SlurmTask.from_environ()
    limit = time_limit(spec, task, echo)  # counts from here: planning and fetching a model take time too
    job = open_job(spec, echo, observer.asked)
    with closing(job.store):
        counts, result = ProgressCounts(), RunResult(output=spec.output, max_error_rate=spec.max_error_rate)
        stop = observer.stop(stop_signals(spec, limit))
        state = RunState(job, observer, stop, limit, counts, result, NoLease(), echo)
        started = time.monotonic()
        if (done := job.store.done()) is not None:
            _take_finished_job(state, done["counts"])
        else:
            _run_unfinished_job(state, task)
            result.seconds = result.seconds or time.monotonic() - started
    result.warnings += job.store.warnings
    observer.result(result, echo)
    return result


def _take_finished_job(run: RunState, output_counts: dict[str, Any]) -> None:
    run.observer.share(run.job.store.plan.chunks, None)
    mine, _ = run.job.shard(set())
    result = run.result
    result.rows_total = result.rows_done = result.rows_reused = _num_rows(mine)
    result.take_counts(output_counts)
    result.job_complete = True


def _run_unfinished_job(run: RunState, task: SlurmTask | None) -> None:
    store, counts, result, observer = run.job.store, run.counts, run.result, run.observer
    committed = store.committed()
    mine, todo = run.job.shard(committed)
    counts.rows_total = _num_rows(mine)
    counts.rows_done = result.rows_reused = counts.rows_total - _num_rows(todo)
    observer.share(store.plan.chunks, committed)
    observer.follow(counts)
    others = _chunks_of_others(run, committed)
    if todo or others or not store.plan.chunks:
        _run_attempt(run, todo, others, task)
    result.rows_done, result.rows_total = counts.rows_done, counts.rows_total
    result.prompt_tokens, result.output_tokens = counts.prompt_tokens, counts.output_tokens
    is_complete = len(store.committed()) == max(1, len(store.plan.chunks))  # sees what others have committed, too
    result.take_counts(store.counts().to_json())
    observer.counted(store)
    if is_complete:
        store.finish()
        result.job_complete = True


def _chunks_of_others(run: RunState, committed: set[int]) -> list[Chunk]:
    """Returns the chunks of other shards that this process may take over."""
    spec, team = run.job.spec, run.observer.team
    if not spec.steal:
        return []
    return [
        chunk
        for chunk in run.job.store.plan.chunks
        if chunk.index not in committed
        and chunk.index % spec.num_shards != spec.shard_id
        and (team is None or team.may_take(chunk.index))
    ]


def _run_attempt(run: RunState, todo: Sequence[Chunk], others: Sequence[Chunk], task: SlurmTask | None) -> None:
    """Runs the chunks with signals handled, under a lease of the shard, and with a record in the output directory."""
    job, counts, result, observer, stop = run.job, run.counts, run.result, run.observer, run.stop
    spec, store, team = job.spec, job.store, run.observer.team
    info = {**_attempt_info(spec, task, observer.hints), "team": None if team is None else team.to_json()}
    with stop:
        run.time_limit.begin()
        store.start_attempt(info)
        observer.attempt(store.attempt, store.output / ".batchjob" / "attempts")
        needed = expected_bytes(spec, job.settings, store.plan, todo)
        if (warning := space_warning(store.output, needed, 2 * len(todo))) is not None:
            run.echo(warning)
        if not store.plan.chunks:
            store.commit_empty()
        else:
            with closing(store.lease((spec.shard_id, spec.num_shards)) if spec.lease else NoLease()) as run.lease:
                run.lease.acquire(on_lost=lambda: stop.request("superseded", time.monotonic()))
                _run_chunks(run, SharedChunks(store, todo, others, counts, team) if spec.steal else OwnChunks(todo))
                run.lease.check()
        if team is not None or counts.rows_done < counts.rows_total:  # others of a team may have rows to do
            result.stopped_by = stop.reason
        num_finished = counts.rows_done - result.rows_reused
        ended = {"by": result.stopped_by or "done", "rows_finished": num_finished}
        ended["first_token_seconds"] = result.first_token_seconds
        store.note_attempt({**info, "ended": ended})
        if result.stopped_by is not None:
            result.requeue = requeue(spec, task, stop, made_progress=num_finished > 0)


def _run_chunks(run: RunState, chunks: OwnChunks) -> None:
    """Loads the engine beside a feeder process, and runs the loop."""
    from batchjob.engine import EngineConfig, create_engine
    from batchjob.job.loop import Loop
    from batchjob.prompts.feeder import Feeder
    from batchjob.prompts.tokenizer import load_tokenizer

    job, observer, result, echo = run.job, run.observer, run.result, run.echo
    spec, settings = job.spec, job.settings
    with ExitStack() as stack:
        feeder = stack.enter_context(closing(Feeder(job.feeder_config, echo)))
        observer.phase(LOAD)
        loading = time.monotonic()
        echo(model_line(settings))
        tokenizer = load_tokenizer(job.tokenizer_name, job.tokenizer_digest)
        unknown = tokenizer.unknown_ids(settings.known_vocab_size or 0)
        unknown = [token for token in unknown if token not in settings.eos_token_ids]  # a row must be able to end
        if (warning := unknown_tokens_warning(settings, unknown)) is not None:
            echo(warning)
        backoff = observer.hints.memory_backoff
        config = EngineConfig.of(spec, settings, unknown_token_ids=tuple(unknown), memory_backoff=backoff)
        engine = create_engine(spec, settings.model, config, tokenizer, before_step=observer.before_step)
        stack.enter_context(closing(engine))
        if settings.model is not None:
            settings.model.refuse_changed_files()
        run.lease.settle(give_up=lambda: run.stop.stopping)
        observer.header(header_lines(job, tokenizer, engine.capacity.description, time.monotonic() - loading), echo)
        show = partial(show_first_prompt, job, tokenizer, echo) if job.is_new else None
        loop = Loop(run, engine, feeder, chunks, on_first_prompt=show)
        started = time.monotonic()
        observer.phase(RUN)
        try:
            loop.run()
            observer.phase(END)
        finally:
            result.seconds = time.monotonic() - started
            result.chunks_stolen = chunks.num_stolen
            if loop.first_token_at is not None:
                result.first_token_seconds = loop.first_token_at - loading


def _attempt_info(spec: JobSpec, task: SlurmTask | None, hints: RestartHints) -> dict[str, Any]:
    """Returns the record of an attempt: all that may differ between two of them."""
    is_free = {f.name: f.metadata["section"] == "engine" and not f.metadata["pinned"] for f in spec_fields()}
    return {
        "batchjob": __version__,
        "python": platform.python_version(),
        "shard": [spec.shard_id, spec.num_shards],
        "slurm": None if task is None else task.to_json(),
        "flush_interval": spec.flush_interval,
        **{name: getattr(spec, name) for name in is_free if is_free[name]},
        "restarts": hints.restarts,
        "last_end": hints.last_end,
        "limits_halved": hints.memory_backoff,
        "num_suspects": sum(map(len, hints.suspects)),
        "poisoned": sorted(hints.poisoned),
    }


def _num_rows(chunks: Iterable[Chunk]) -> int:
    return sum(chunk.num_rows for chunk in chunks)
