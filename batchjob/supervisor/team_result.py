"""`result_of`: the results of all workers of a command as one."""

from __future__ import annotations

from collections.abc import Sequence

from batchjob.report.result import RunResult
from batchjob.spec import JobSpec
from batchjob.supervisor.replica import Replica
from batchjob.supervisor.reporter import Reporter


def result_of(spec: JobSpec, replicas: Sequence[Replica], reporter: Reporter) -> RunResult:
    """Returns all but the reason of an early end, which the supervisor knows."""
    rows = reporter.rows
    results = [replica.result for replica in replicas if replica.result is not None]
    result = RunResult(
        output=str(spec.output),
        rows_total=rows.rows_total,
        rows_done=rows.rows_done,
        rows_reused=rows.rows_reused,
        rows_saved=sum(result.rows_saved for result in results),
        rows_continued=sum(result.rows_continued for result in results),
        chunks_stolen=sum(result.chunks_stolen for result in results),
        rows_wasted=sum(result.rows_wasted for result in results),
        max_error_rate=spec.max_error_rate,
        prompt_tokens=sum(replica.prompt_tokens for replica in replicas),
        output_tokens=sum(replica.output_tokens for replica in replicas),
        seconds=reporter.seconds,
        first_token_seconds=min((r.first_token_seconds for r in results if r.first_token_seconds), default=None),
        job_complete=any(result.job_complete for result in results),
    )
    if len(replicas) > 1:
        result.rows_by_device = {replica.name: replica.rows_finished for replica in replicas}
    result.take_counts(_counts(replicas))
    result.warnings = _warnings(replicas, reporter)
    return result


def _counts(replicas: Sequence[Replica]) -> dict[str, object]:
    """Counts the rows of the whole output: the parts as the worker saw them that left last, and the chunks that each
    left open."""
    done = [replica.result for replica in replicas if replica.result is not None and replica.result.job_complete]
    if done:
        return {"ok": done[0].num_ok, "error": done[0].num_failed, "errors": done[0].errors}
    seen = [replica.counts for replica in replicas if replica.counts is not None]
    if not seen:
        return {"ok": 0, "error": 0, "errors": {}}
    latest = max((parts for parts, _ in seen), key=lambda parts: parts["ok"] + parts["error"])
    errors: dict[str, int] = {}
    for counts in [latest, *(rest for _, rest in seen)]:
        for kind, number in counts["errors"].items():
            errors[kind] = errors.get(kind, 0) + number
    ok, error = (latest[name] + sum(rest[name] for _, rest in seen) for name in ("ok", "error"))
    return {"ok": ok, "error": error, "errors": errors}


def _warnings(replicas: Sequence[Replica], reporter: Reporter) -> list[str]:
    """A warning of several workers is told once, without a device."""
    found: dict[str, list[Replica]] = {}
    for replica in replicas:
        if replica.result is not None:
            for warning in (*replica.result.warnings, *_restarted(replica)):
                found.setdefault(warning, []).append(replica)
    lines = [text if len(which) > 1 else reporter.labelled(which[0], text) for text, which in found.items()]
    failed = [(replica.name, replica.failure.message) for replica in replicas if replica.failure is not None]
    return lines + [f"{name} failed: {message}" for name, message in failed]


def _restarted(replica: Replica) -> list[str]:
    number = replica.num_restarts
    times = "once" if number == 1 else f"{number} times"
    return [f"the worker was restarted {times}, the last time because it {replica.last_end}"] if number else []
