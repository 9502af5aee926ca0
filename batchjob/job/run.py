"""`run`: one call from a `JobSpec` to finished rows, in a new output directory or in the one that is there.

A resume is the ordinary way to start: whatever is in the output directory already is kept, and only the rest runs.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchjob import __version__
from batchjob.errors import ConfigMismatchError, UsageError
from batchjob.job.chunk_source import OwnChunks, SharedChunks
from batchjob.job.devices import only_device
from batchjob.job.disk_space import expected_bytes, refuse_damaged_settings, space_warning
from batchjob.job.extend import extend, find_new_inputs
from batchjob.job.observer import END, LOAD, RUN, RestartHints, RunObserver
from batchjob.job.settings import (
    Settings,
    describe_sampling,
    fingerprint,
    now,
    parse_memory,
    prompt_config,
    prompt_source,
    resolve_settings,
)
from batchjob.job.stop import StopSignals, requeue, stop_signals, time_limit
from batchjob.prompts.source import PromptSource
from batchjob.report import console
from batchjob.report.progress import Progress, ProgressCounts, counted, duration, printable
from batchjob.report.redact import redact_values
from batchjob.report.result import RunResult
from batchjob.slurm import SlurmTask
from batchjob.spec import JobSpec
from batchjob.store.columns import OutputColumns
from batchjob.store.lease import Lease, NoLease
from batchjob.store.manifest import Manifest
from batchjob.store.store import Store

if TYPE_CHECKING:
    from batchjob.job.time_limit import TimeLimit
    from batchjob.job.validate import Report
    from batchjob.models import ModelInfo
    from batchjob.plan import Chunk
    from batchjob.prompts import PromptConfig
    from batchjob.prompts.feeder import FeederConfig
    from batchjob.prompts.tokenizer import Tokenizer
    from batchjob.records import Prompt

Echo = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Job:
    """A job whose output directory exists. `source` is None for an input without rows."""

    spec: JobSpec
    settings: Settings
    store: Store
    source: PromptSource | None
    is_new: bool
    tokenizer: Tokenizer | None = None  # where it has been loaded already

    @property
    def prompt_config(self) -> PromptConfig:
        assert self.source is not None
        return prompt_config(self.spec, self.settings, self.source, self.clock)

    @property
    def clock(self) -> str | None:
        """What the chat template takes for now; None in a job of a version that did not keep it."""
        clock: str | None = self.store.manifest.resolved.get("clock")
        return clock

    @property
    def tokenizer_name(self) -> str:
        return "fake" if self.settings.model is None else self.settings.model.path

    @property
    def tokenizer_digest(self) -> str:
        return "" if self.settings.model is None else self.settings.model.text_digest

    @property
    def feeder_config(self) -> FeederConfig:
        from batchjob.prompts.feeder import FeederConfig

        return FeederConfig(
            plan=self.store.plan,
            prompt=self.prompt_config,
            tokenizer=self.tokenizer_name,
            tokenizer_digest=self.tokenizer_digest,
            max_row_bytes=self.spec.max_row_bytes,
            load_seconds=self.spec.load_timeout,
        )

    def shard(self, committed: set[int]) -> tuple[list[Chunk], list[Chunk]]:
        """This process's chunks: all, and those still to do."""
        mine = [c for c in self.store.plan.chunks if c.index % self.spec.num_shards == self.spec.shard_id]
        return mine, [c for c in mine if c.index not in committed]


def run(spec: JobSpec, *, echo: Echo | None = None, observer: RunObserver | None = None) -> RunResult:
    """Runs the job, or what is left of it, in this process. `echo` gets the lines for a person; the default prints them
    to stderr. `observer` is whoever watches over the run: nobody, unless a supervisor started it.

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
        result = _run(job, observer, task, limit, echo)
    result.warnings += job.store.warnings
    observer.result(result, echo)
    return result


# -- creating and resuming


def open_job(
    spec: JobSpec, echo: Echo, asked: JobSpec | None = None, *, check: Callable[[ModelInfo], None] | None = None
) -> Job:
    """The job in `spec.output`: made now, or found there and held against `spec`. A new one keeps `asked` as a record
    of what it was started with. Nothing is made where `check` refuses the model."""
    from batchjob.inputs.planner import shared_streams

    output = Path(spec.output or "")
    job = _resume(spec, output, echo) if Store.exists(output) else _create(spec, output, echo, asked or spec, check)
    for warning in shared_streams(job.store.plan, spec.num_shards):
        echo(f"warning: {warning}")
    return job


def _create(spec: JobSpec, output: Path, echo: Echo, asked: JobSpec, check: Callable[[ModelInfo], None] | None) -> Job:
    from batchjob.inputs.planner import make_plan

    settings = resolve_settings(spec)
    if check is not None and settings.model is not None:
        check(settings.model)
    started = time.monotonic()
    planned = make_plan(spec, num_workers_hint=spec.num_shards)
    plan = planned.plan
    for warning in planned.warnings:
        echo(f"warning: {warning}")
    if planned.num_bad_rows:
        echo(f"warning: {planned.num_bad_rows:,} rows cannot be read and become row errors: {planned.first_bad_row}")
    seconds = duration(time.monotonic() - started)
    size = (
        f"{counted(plan.num_rows, 'row')} of {counted(len(plan.files), 'file')} in {counted(len(plan.chunks), 'chunk')}"
    )
    echo(f"planned {size} ({seconds})")
    source = prompt_source(spec, settings, planned.columns) if plan.num_rows else None
    clock, tokenizer = now(), None
    if source is not None:
        from batchjob.job.first_rows import check_first_rows
        from batchjob.prompts.tokenizer import load_tokenizer

        tokenizer = load_tokenizer("fake" if settings.model is None else settings.model.path)
        config = prompt_config(spec, settings, source, clock)
        columns = list(planned.columns)
        for warning in check_first_rows(plan, config, tokenizer, columns, max_row_bytes=spec.max_row_bytes):
            echo(f"warning: {printable(warning, limit=2000)}")
    chunk_rows = max((chunk.num_rows for chunk in plan.chunks), default=0)
    manifest = Manifest.new(
        plan,
        spec=redact_values(asdict(asked)),
        resolved={**settings.to_json(), "columns": list(planned.columns), "chunk_rows": chunk_rows, "clock": clock},
        fingerprint=_fingerprint(spec, settings, source, spec.chunk_rows or chunk_rows),
        num_samples=settings.sampling.n,
        columns=OutputColumns.asked(spec),
    )
    store = Store.create(output, manifest, plan)
    _refuse_difference(store.manifest, manifest, output)
    return Job(spec, settings, store, source, is_new=True, tokenizer=tokenizer)


def _resume(spec: JobSpec, output: Path, echo: Echo) -> Job:
    store = Store.open(output)
    manifest = store.manifest
    refuse_damaged_settings(manifest, output / ".batchjob" / "job.json")
    settings = resolve_settings(spec, manifest.resolved)
    new, plan = find_new_inputs(spec, store.plan, echo)
    source = prompt_source(spec, settings, manifest.resolved["columns"]) if store.plan.num_rows else None
    chunk_rows = spec.chunk_rows or manifest.fingerprint["chunk_rows"]
    asked = replace(
        manifest,
        fingerprint=_fingerprint(spec, settings, source, chunk_rows),
        num_samples=settings.sampling.n,
    )
    _refuse_difference(manifest, asked, output)
    if new:
        extend(spec, store, source, echo)
        plan = find_new_inputs(spec, store.plan, lambda line: None)[1]
    store.plan = plan  # with the paths and times that its files have now
    return Job(spec, settings, store, source, is_new=False)


def _fingerprint(spec: JobSpec, settings: Settings, source: PromptSource | None, chunk_rows: int) -> dict[str, Any]:
    prompt: dict[str, Any] = {"chat": spec.chat, "system": spec.system}
    if source is not None:
        columns = source.to_dict()
        columns.pop("id")  # names rows in messages only
        prompt.update(columns)
    return fingerprint(spec, settings, prompt=prompt, chunk_rows=chunk_rows)


def _refuse_difference(there: Manifest, asked: Manifest, output: Path) -> None:
    lines = there.diff(asked)
    if lines:
        raise ConfigMismatchError(
            f"{output} holds a job with other settings, so its rows would not be of one kind:\n  "
            + "\n  ".join(lines)
            + "\nRun with the old settings to go on, or give another --output."
        )


# -- running


def _run(job: Job, observer: RunObserver, task: SlurmTask | None, limit: TimeLimit, echo: Echo) -> RunResult:
    spec, store, team = job.spec, job.store, observer.team
    started = time.monotonic()
    if (done := store.done()) is not None:
        observer.share(store.plan.chunks, None)
        mine, _ = job.shard(set())
        num_rows = sum(chunk.num_rows for chunk in mine)
        result = RunResult(output=str(spec.output), rows_total=num_rows, rows_done=num_rows, rows_reused=num_rows)
        result.max_error_rate = spec.max_error_rate
        result.take_counts(done["counts"])
        result.job_complete = True
        return result
    committed = store.committed()
    mine, todo = job.shard(committed)
    counts = ProgressCounts(
        rows_total=sum(chunk.num_rows for chunk in mine),
        rows_done=sum(chunk.num_rows for chunk in mine if chunk.index in committed),
    )
    result = RunResult(output=str(spec.output), rows_total=counts.rows_total, max_error_rate=spec.max_error_rate)
    result.rows_reused = counts.rows_done
    observer.share(store.plan.chunks, committed)
    observer.follow(counts)
    own = {chunk.index for chunk in mine}
    others = [c for c in store.plan.chunks if c.index not in committed and c.index not in own] if spec.steal else []
    if team is not None:
        others = [chunk for chunk in others if team.may_take(chunk.index)]
    if todo or others or not store.plan.chunks:
        info = {**_attempt_info(spec, task, observer.hints), "team": None if team is None else team.to_json()}
        with observer.stop(stop_signals(spec, limit)) as stop:
            limit.begin()
            store.start_attempt(info)
            observer.attempt(store.attempt, store.output / ".batchjob" / "attempts")
            needed = expected_bytes(spec, job.settings, store.plan, todo)
            if (warning := space_warning(store.output, needed, 2 * len(todo))) is not None:
                echo(warning)
            if not store.plan.chunks:
                store.commit_empty()
            else:
                with closing(store.lease((spec.shard_id, spec.num_shards)) if spec.lease else NoLease()) as lease:
                    lease.acquire(on_lost=lambda: stop.request("superseded", time.monotonic()))
                    chunks = SharedChunks(store, todo, others, counts, team) if spec.steal else OwnChunks(todo)
                    _work(job, chunks, counts, result, stop, observer, limit, lease, echo)
                    lease.check()
            if team is not None or counts.rows_done < counts.rows_total:  # others of a team may have rows to do
                result.stopped_by = stop.reason
            num_finished = counts.rows_done - result.rows_reused
            ended = {"by": result.stopped_by or "done", "rows_finished": num_finished}
            ended["first_token_seconds"] = result.first_token_seconds
            store.note_attempt({**info, "ended": ended})
            if result.stopped_by is not None:
                result.requeue = requeue(spec, task, stop, made_progress=num_finished > 0)
    result.rows_done, result.rows_total = counts.rows_done, counts.rows_total
    result.prompt_tokens, result.output_tokens = counts.prompt_tokens, counts.output_tokens
    is_complete = len(store.committed()) == max(1, len(store.plan.chunks))  # sees what others have committed, too
    result.take_counts(store.counts().to_json())
    observer.counted(store)
    if is_complete:
        store.finish()
        result.job_complete = True
    result.seconds = result.seconds or time.monotonic() - started
    return result


def _work(
    job: Job,
    chunks: OwnChunks,
    counts: ProgressCounts,
    result: RunResult,
    stop: StopSignals,
    observer: RunObserver,
    limit: TimeLimit,
    lease: Lease | NoLease,
    echo: Echo,
) -> None:
    from batchjob.engine import EngineConfig, create_engine
    from batchjob.inputs.reader import InputReader
    from batchjob.job.loop import Loop
    from batchjob.prompts.feeder import Feeder
    from batchjob.prompts.tokenizer import load_tokenizer

    spec, settings = job.spec, job.settings
    with ExitStack() as stack:
        feeder = Feeder(job.feeder_config, echo)
        stack.callback(feeder.close)
        observer.phase(LOAD)
        loading = time.monotonic()
        echo(_model_line(settings))
        tokenizer = load_tokenizer(job.tokenizer_name, job.tokenizer_digest)
        unknown = tokenizer.unknown_ids(settings.known_vocab_size or 0)
        unknown = [token for token in unknown if token not in settings.eos_token_ids]  # a row must be able to end
        if len(unknown) > settings.vocab_size // 50:  # more than a vocabulary is padded by
            echo(
                f"warning: the tokenizer has no token for {len(unknown):,} of the model's {settings.vocab_size:,} ids, "
                "so they are never drawn; is it the tokenizer of this model?"
            )
        config = EngineConfig(
            max_model_len=settings.max_model_len,
            max_num_seqs=spec.max_num_seqs,
            max_num_batched_tokens=spec.max_num_batched_tokens,
            block_size=spec.block_size,
            kv_cache_bytes=parse_memory(spec.kv_cache_memory),
            prefix_caching=spec.prefix_caching,
            dtype=settings.dtype,
            device=settings.device,
            eos_token_ids=settings.eos_token_ids,
            halvings=observer.hints.memory_backoff,
            attention_backend=spec.attention_backend,
            kv_cache_dtype=spec.kv_cache_dtype,
            cuda_graphs=spec.cuda_graphs,
            async_scheduling={"auto": None, "on": True, "off": False}[spec.async_scheduling],
            admission_interval=spec.admission_interval,
            decode_steps_per_launch=spec.decode_steps_per_launch,
            deterministic=spec.deterministic,
            tensor_parallel=spec.tensor_parallel,
            unknown_token_ids=tuple(unknown),
        )
        engine = create_engine(spec, settings.model, config, tokenizer, before_step=observer.before_step)
        stack.callback(engine.close)
        if settings.model is not None:
            settings.model.refuse_changed_files()
        lease.settle(give_up=lambda: stop.stopping)
        reader = InputReader(job.store.plan, max_row_bytes=spec.max_row_bytes)
        stack.callback(reader.close)
        observer.header(_header(job, tokenizer, engine.capacity.description, time.monotonic() - loading), echo)
        progress = Progress(counts, mode=spec.progress, echo=echo)
        stack.callback(progress.close)
        loop = Loop(
            store=job.store,
            engine=engine,
            feeder=feeder,
            reader=reader,
            sampling=settings.row_sampling(),
            job_seed=settings.job_seed,
            counts=counts,
            progress=progress,
            stop=stop,
            observer=observer,
            lease=lease,
            time_limit=limit,
            flush_interval=spec.flush_interval,
            order=spec.order,
            save_partial=spec.save_partial,
            full_disk_timeout=spec.full_disk_timeout,
            echo=echo,
            on_first_prompt=partial(_show_first_prompt, job, tokenizer, echo) if job.is_new else None,
        )
        started = time.monotonic()
        observer.phase(RUN)
        try:
            loop.run(chunks)
            observer.phase(END)
        finally:
            result.seconds = time.monotonic() - started
            if loop.first_token_at is not None:
                result.first_token_seconds = loop.first_token_at - loading
            result.rows_reused += loop.num_reused
            result.rows_saved, result.rows_continued = loop.num_saved, loop.num_continued
            result.rows_wasted, result.chunks_stolen = loop.num_wasted, chunks.num_stolen
            result.warnings += loop.warnings


# -- what a person is told


def _attempt_info(spec: JobSpec, task: SlurmTask | None, hints: RestartHints) -> dict[str, Any]:
    """What may differ between attempts, kept as a record."""
    names = (
        "max_num_seqs", "max_num_batched_tokens", "block_size", "kv_cache_memory", "attention_backend", "cuda_graphs",
        "async_scheduling", "admission_interval", "decode_steps_per_launch", "tensor_parallel",
    )  # fmt: skip
    free = {name: getattr(spec, name) for name in names}
    return {
        "batchjob": __version__,
        "python": platform.python_version(),
        "shard": [spec.shard_id, spec.num_shards],
        "slurm": None if task is None else task.to_json(),
        "order": spec.order,
        "device": spec.device,
        "prefix_caching": spec.prefix_caching,
        "flush_interval": spec.flush_interval,
        **free,
        "restarts": hints.restarts,
        "last_end": hints.last_end,
        "limits_halved": hints.memory_backoff,
        "num_suspects": sum(map(len, hints.suspects)),
        "condemned": sorted(hints.poisoned),
    }


def _model_line(settings: Settings) -> str:
    name = "the fake engine" if settings.model is None else settings.model.name
    return f"loading {name} ({settings.dtype} on {settings.device})"


def _header(job: Job, tokenizer: Tokenizer, engine_line: str, seconds: float) -> list[str]:
    settings = job.settings
    sampling = settings.row_sampling()
    lines = [
        f"engine    {engine_line} (ready in {duration(seconds)})",
        f"sampling  {describe_sampling(sampling)}; seed {settings.job_seed}; max_model_len {settings.max_model_len}",
    ]
    model = settings.model
    if model is not None:
        from batchjob.models import ignored_generation_settings

        lines += [f"warning: {warning}" for warning in model.warnings]
        if ignored := ignored_generation_settings(model):
            lines.append(f"warning: generation_config.json asks for {', '.join(ignored)}: not supported, left out")
    if sampling.max_tokens is None:
        lines.append(
            f"warning: no --max-tokens: a row may make up to {settings.max_model_len - 1:,} tokens before it is cut"
        )
    source, spec = job.source, job.spec
    is_chat = spec.chat or spec.system is not None or (source is not None and source.kind in ("messages", "any"))
    if is_chat and tokenizer.template_mentions("strftime_now"):
        what = f"{job.clock} in all of this job" if job.clock else "of each process: this job has none of its own"
        lines.append(f"clock     the chat template writes a date; its time is {what}")
    is_text = source is not None and source.kind in ("text", "template", "any")
    if (
        is_text
        and settings.model is not None
        and settings.has_chat_template
        and not (spec.chat or spec.raw or spec.system is not None)
    ):
        lines.append(
            "warning: text is sent raw although the model has a chat template; --chat uses it, --raw silences this"
        )
    return lines


def _show_first_prompt(job: Job, tokenizer: Any, echo: Echo, prompt: Prompt, chunk: Chunk) -> None:
    """The first prompt as text and as tokens: what a person checks before a long run. It has been through the feeder:
    a row at which a tokeniser comes down must not do so here."""
    from batchjob.inputs.reader import InputReader
    from batchjob.prompts import PromptBuilder

    assert job.source is not None
    if prompt.error is not None:
        echo(f"warning: the first row fails: {printable(prompt.error.message)}")
        return
    with closing(InputReader(job.store.plan, max_row_bytes=job.spec.max_row_bytes)) as reader:
        rows = reader.rows(chunk, job.source.read, skip=range(chunk.row_index, prompt.row_index))
        text = PromptBuilder(job.prompt_config, tokenizer).prompt_text(next(rows))
    if text is not None:
        echo(f"first row  {printable(text)}")
    shown = " ".join(map(str, prompt.token_ids[:24])) + (" ..." if len(prompt.token_ids) > 24 else "")
    echo(f"           {len(prompt.token_ids)} tokens: {shown}")


def validate(spec: JobSpec) -> Report:
    """Checks a job without a device: rows, prompts, lengths, ids. Raises a BatchJobError where nothing could run."""
    from batchjob.job.validate import validate_job
    from batchjob.models import check_loadable

    if not spec.input:
        raise UsageError("give --input: a JSONL or Parquet file, a directory or a glob")
    anywhere = spec if spec.devices == "auto" else spec.replace(device="cpu", devices="auto")
    settings = resolve_settings(anywhere)
    if settings.model is not None:
        check_loadable(settings.model)
    return validate_job(spec, settings)
