"""The job in an output directory: created there, or found there, held against the spec and resumed.

A resume is the ordinary way to start: what is in the output directory already is kept, and only the rest runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchjob.errors import ConfigMismatchError, StorageError, UsageError
from batchjob.job.extend import echo_warnings, extend, find_new_inputs
from batchjob.job.settings import Settings, fingerprint, resolve_settings
from batchjob.prompts.source import PromptSource, resolve_prompt
from batchjob.report.progress import counted, duration, printable
from batchjob.report.redact import redact_values
from batchjob.spec import JobSpec
from batchjob.store.columns import OutputColumns
from batchjob.store.manifest import Manifest
from batchjob.store.store import Store

if TYPE_CHECKING:
    from batchjob.job.observer import RunObserver
    from batchjob.job.stop import StopSignals
    from batchjob.job.time_limit import TimeLimit
    from batchjob.models import ModelInfo
    from batchjob.plan import Chunk
    from batchjob.prompts import PromptConfig
    from batchjob.prompts.feeder import FeederConfig
    from batchjob.report.progress import ProgressCounts
    from batchjob.report.result import RunResult
    from batchjob.store.lease import Lease, NoLease

Echo = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Job:
    """A job whose output directory exists. `source` is None for an input without rows; `is_new`: created just now."""

    spec: JobSpec
    settings: Settings
    store: Store
    source: PromptSource | None
    is_new: bool

    @property
    def prompt_config(self) -> PromptConfig:
        assert self.source is not None
        return prompt_config(self.spec, self.settings, self.source, self.clock)

    @property
    def clock(self) -> str | None:
        """The time that the chat template gets; None in a job of a version that did not keep it."""
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
        """Returns this process's chunks: all of them, and those still to do."""
        mine = [c for c in self.store.plan.chunks if c.index % self.spec.num_shards == self.spec.shard_id]
        return mine, [c for c in mine if c.index not in committed]


@dataclass(slots=True)
class RunState:
    """One process's run of a job: the parts that its steps share. `counts` and `result` grow while it goes on."""

    job: Job
    observer: RunObserver
    stop: StopSignals
    time_limit: TimeLimit
    counts: ProgressCounts
    result: RunResult
    lease: Lease | NoLease
    echo: Echo

    def tell_alive(self) -> None:
        """Tells the observer of progress: a step, a commit, new prompts."""
        self.observer.alive(self.counts.prompt_tokens, self.counts.output_tokens)


def open_job(
    spec: JobSpec, echo: Echo, asked: JobSpec | None = None, *, check: Callable[[ModelInfo], None] | None = None
) -> Job:
    """Creates the job in `spec.output`, or resumes the one that is there after a comparison with `spec`.

    A new job keeps `asked` as a record of what it was started with. Nothing is created if `check` refuses the model.
    Raises a BatchJobError, among them ConfigMismatchError.
    """
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
    echo_warnings(planned, echo)
    seconds = duration(time.monotonic() - started)
    size = (
        f"{counted(plan.num_rows, 'row')} of {counted(len(plan.files), 'file')} in {counted(len(plan.chunks), 'chunk')}"
    )
    echo(f"planned {size} ({seconds})")
    source = prompt_source(spec, settings, planned.columns) if plan.num_rows else None
    clock = now()
    if source is not None:
        from batchjob.prompts.first_rows import check_first_rows
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
    return Job(spec, settings, store, source, is_new=True)


def _resume(spec: JobSpec, output: Path, echo: Echo) -> Job:
    store = Store.open(output)
    manifest = store.manifest
    _refuse_damaged_settings(manifest, output / ".batchjob" / "job.json")
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


def _refuse_damaged_settings(manifest: Manifest, source: Path) -> None:
    """Checks the settings that a resume takes over from job.json. Raises StorageError if batchjob writes no such."""
    resolved, chunk_rows = manifest.resolved, manifest.fingerprint.get("chunk_rows")
    model, columns = resolved.get("model"), resolved.get("columns")
    names = [resolved.get("revision"), model.get("name") if isinstance(model, dict) else model]
    if (
        not isinstance(columns, list)
        or not all(isinstance(name, str) for name in columns)
        or not all(name is None or isinstance(name, str) for name in names)
        or resolved.get("dtype") not in ("float32", "bfloat16", "float16")
        or type(chunk_rows) is not int
        or not _is_time(resolved.get("clock"))
    ):
        raise StorageError(f"{source} is damaged: its settings are not valid. Restore it from a copy.")


def _is_time(clock: object) -> bool:
    if clock is None:
        return True
    try:
        return isinstance(clock, str) and datetime.fromisoformat(clock) is not None
    except ValueError:
        return False


def prompt_source(spec: JobSpec, settings: Settings, columns: Iterable[str]) -> PromptSource:
    """Where prompts come from. What can never work is refused here, before a model is loaded."""
    source = resolve_prompt(spec, columns)
    wants_template = spec.chat or spec.system is not None or source.kind == "messages"
    if wants_template and not settings.has_chat_template:
        assert settings.model is not None
        raise UsageError(
            f"{settings.model.name} has no chat template: use an instruction-tuned model, or send text with --prompt "
            "and without --chat, --system and --messages"
        )
    return source


def prompt_config(spec: JobSpec, settings: Settings, source: PromptSource, clock: str | None) -> PromptConfig:
    """All that prompts depend on. `clock` is the job's, see `now`."""
    from batchjob.prompts import PromptConfig

    return PromptConfig(
        source=source,
        sampling=settings.sampling,
        max_model_len=settings.max_model_len,
        vocab_size=settings.vocab_size,
        chat=spec.chat,
        system=spec.system,
        length_policy=spec.length_policy,
        special_tokens=settings.special_tokens() if source.params else {},
        clock=clock,
    )


def now() -> str:
    """The local time, to be kept: what a chat template that writes the date takes for now in every process of a job."""
    return datetime.now().isoformat(timespec="seconds")
