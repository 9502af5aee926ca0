"""What the workers of a team came to together, as one result."""

from __future__ import annotations

from collections.abc import Sequence

from batchjob.report.result import RunResult
from batchjob.spec import JobSpec
from batchjob.supervisor.member import Member
from batchjob.supervisor.reporter import Voice


def result_of(spec: JobSpec, members: Sequence[Member], voice: Voice) -> RunResult:
    """Without what ended it early, which is for the supervisor to say."""
    tally = voice.tally
    results = [member.result for member in members if member.result is not None]
    result = RunResult(
        output=str(spec.output),
        rows_total=tally.rows_total,
        rows_done=tally.rows_done,
        rows_reused=tally.rows_reused,
        rows_saved=sum(result.rows_saved for result in results),
        rows_continued=sum(result.rows_continued for result in results),
        chunks_stolen=sum(result.chunks_stolen for result in results),
        rows_wasted=sum(result.rows_wasted for result in results),
        max_error_rate=spec.max_error_rate,
        prompt_tokens=sum(member.lane.prompt_tokens for member in members),
        output_tokens=sum(member.lane.output_tokens for member in members),
        seconds=voice.seconds,
        first_token_seconds=min((r.first_token_seconds for r in results if r.first_token_seconds), default=None),
        job_complete=any(result.job_complete for result in results),
        rows_by_device={member.lane.name: member.lane.rows_finished for member in members},
    )
    result.take_counts(_counts(members))
    result.warnings = _warnings(members)
    return result


def _counts(members: Sequence[Member]) -> dict[str, object]:
    """Of the whole output: the parts as the worker saw them who left last, and the chunks that each left open."""
    done = [member.result for member in members if member.result is not None and member.result.job_complete]
    if done:
        return {"ok": done[0].num_ok, "error": done[0].num_failed, "errors": done[0].errors}
    seen = [member.counts for member in members if member.counts is not None]
    if not seen:
        return {"ok": 0, "error": 0, "errors": {}}
    latest = max((parts for parts, _ in seen), key=lambda parts: parts["ok"] + parts["error"])
    errors: dict[str, int] = {}
    for counts in [latest, *(rest for _, rest in seen)]:
        for kind, number in counts["errors"].items():
            errors[kind] = errors.get(kind, 0) + number
    ok, error = (latest[name] + sum(rest[name] for _, rest in seen) for name in ("ok", "error"))
    return {"ok": ok, "error": error, "errors": errors}


def _warnings(members: Sequence[Member]) -> list[str]:
    """What several of them found is said once."""
    found: dict[str, list[str]] = {}
    for member in members:
        for warning in () if member.result is None else member.result.warnings:
            found.setdefault(warning, []).append(member.lane.name)
    lines = [text if len(names) > 1 else f"{names[0]}: {text}" for text, names in found.items()]
    failed = [(member.lane.name, member.failure.message) for member in members if member.failure is not None]
    return lines + [f"{name} failed: {message}" for name, message in failed]
