"""`batchjob validate`: checks a job's input without a model, in one streaming pass, with bounded memory and no torch.

Rows go the way they go in a run: the same readers, templates, tokenizer and limits.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from batchjob.errors import UsageError
from batchjob.inputs.duplicates import MAX_EXAMPLES, DuplicateFinder
from batchjob.inputs.planner import PlanResult, make_plan
from batchjob.inputs.reader import InputReader
from batchjob.job.open import now, prompt_config, prompt_source
from batchjob.job.settings import Settings, resolve_settings
from batchjob.job.stop import time_limit
from batchjob.prompts import PromptBuilder
from batchjob.prompts.feeder import Feeder, FeederConfig, PromptFeeder
from batchjob.prompts.first_rows import check_first_rows
from batchjob.prompts.paths import look_up_or_none
from batchjob.prompts.tokenizer import Tokenizer, load_tokenizer
from batchjob.records import Prompt, Record
from batchjob.report.validation import Report
from batchjob.spec import JobSpec
from batchjob.store.columns import OutputColumns
from batchjob.store.schema import output_schema

if TYPE_CHECKING:
    from batchjob.plan import Chunk

_SHOWN_CHARS = 2000  # of the first prompt
_SHOWN_TOKENS = 256
_CHUNKS_AHEAD = 4


def validate(spec: JobSpec) -> Report:
    """Checks a job without a device: rows, prompts, lengths, ids. Raises a BatchJobError where nothing could run."""
    from batchjob.models import check_loadable

    if not spec.input:
        raise UsageError("give --input: a JSONL or Parquet file, a directory or a glob")
    anywhere = spec if spec.devices == "auto" else spec.replace(device="cpu", devices="auto")
    settings = resolve_settings(anywhere)
    if settings.model is not None:
        check_loadable(settings.model)
    return validate_job(spec, settings)


def validate_job(spec: JobSpec, settings: Settings) -> Report:
    """Plans the job's input and checks every row of it. Raises the errors of a run before its first row."""
    result = make_plan(spec, num_workers_hint=spec.num_shards)
    output_schema(result.plan, OutputColumns.asked(spec))  # refuses names and types
    time_limit(spec, None, lambda line: None)
    if not result.plan.num_rows:
        files = [file.path for file in result.plan.files]
        return Report(files, dict(result.columns), "nothing", warnings=[*result.warnings, "the input has no rows"])
    source = prompt_source(spec, settings, result.columns)
    prompt = prompt_config(spec, settings, source, now())
    tokenizer = "fake" if settings.model is None else settings.model.path
    config = FeederConfig(result.plan, prompt, tokenizer, spec.max_row_bytes)
    warnings = check_first_rows(
        result.plan, prompt, load_tokenizer(tokenizer), list(result.columns), max_row_bytes=spec.max_row_bytes
    )
    report = validate_input(result, config, block_size=spec.block_size, max_error_rate=spec.max_error_rate)
    report.warnings += warnings
    return report


def validate_input(
    result: PlanResult, config: FeederConfig, *, block_size: int = 16, max_error_rate: float = 0.01
) -> Report:
    """Reads, renders and tokenises every row of the plan and reports all findings.

    Raises the errors of a run before its first row (InputMissingError, InputDataError, UsageError).
    """
    source = config.prompt.source
    report = Report(
        files=[file.path for file in result.plan.files],
        columns=dict(result.columns),
        prompt=f"{source.kind} {source.template!r}"
        if source.template
        else f"{source.kind} {', '.join(source.columns)}",
        num_chunks=len(result.plan.chunks),
        id_column=source.id,
        warnings=list(result.warnings),
        max_error_rate=max_error_rate,
    )
    tokenizer = load_tokenizer(config.tokenizer)
    builder = PromptBuilder(config.prompt, tokenizer)
    reader = InputReader(result.plan, max_row_bytes=config.max_row_bytes)
    lengths: Counter[int] = Counter()
    prefixes = PrefixShare(block_size)
    special = _SpecialTokens(tokenizer.special_tokens)
    with DuplicateFinder() as ids, closing(Feeder(config, report.warnings.append)) as feeder:
        records, prompts = _records(reader, result, source.read), _prompts(feeder, result.plan.chunks)
        for record, prompt in zip(records, prompts, strict=True):
            report.num_rows += 1
            _note_row(report, record, prompt, special, source.columns)
            row_id = None if source.id is None else look_up_or_none(record.fields, source.id)
            if row_id is not None:
                ids.add(json.dumps(row_id, default=str), record.where)
            elif source.id is not None:
                report.num_missing_ids += 1
            if prompt.error is None:
                lengths[len(prompt.token_ids)] += 1
                prefixes.add(prompt.token_ids)
                if not report.first_prompt_tokens:
                    _note_first_prompt(report, builder.prompt_text(record), prompt, tokenizer)
        report.num_duplicate_ids, report.duplicate_id_examples = ids.result()
    report.warnings += reader.warnings
    reader.close()
    report.num_prompt_tokens = sum(length * count for length, count in lengths.items())
    report.token_lengths = length_summary(lengths)
    report.token_histogram = length_histogram(lengths)
    report.shared_prefix_share, report.shared_prefix_exact = prefixes.share, prefixes.exact
    return report


def _records(reader: InputReader, result: PlanResult, columns: Sequence[str]) -> Iterator[Record]:
    for chunk in result.plan.chunks:
        yield from reader.rows(chunk, columns)


def _prompts(feeder: PromptFeeder, chunks: Sequence[Chunk]) -> Iterator[Prompt]:
    num_fed = num_done = 0
    while num_done < len(chunks):
        while num_fed < min(len(chunks), num_done + _CHUNKS_AHEAD):
            feeder.feed(chunks[num_fed])
            num_fed += 1
        for batch in feeder.poll(1.0):
            yield from batch.prompts
            num_done += batch.last


def _note_row(report: Report, record: Record, prompt: Prompt, special: _SpecialTokens, columns: Sequence[str]) -> None:
    error = prompt.error
    if error is not None:
        report.num_bad_rows += 1
        found = report.errors.setdefault(error.type, {"count": 0, "examples": []})
        found["count"] += 1
        if len(found["examples"]) < MAX_EXAMPLES:
            found["examples"].append(error.message)
        return
    token = special.find([look_up_or_none(record.fields, name) for name in columns])
    if token is not None:
        report.num_rows_with_special_tokens += 1
        if len(report.special_token_examples) < MAX_EXAMPLES:
            report.special_token_examples.append(f"{record.where}: {token}")


def _note_first_prompt(report: Report, text: str | None, prompt: Prompt, tokenizer: Tokenizer) -> None:
    if text is not None and len(text) > _SHOWN_CHARS:
        text = text[:_SHOWN_CHARS] + "..."
    report.first_prompt_text = text
    shown = tokenizer.convert_ids_to_tokens(prompt.token_ids[:_SHOWN_TOKENS])
    left = len(prompt.token_ids) - len(shown)
    report.first_prompt_tokens = [*shown, f"... {left:,} more"] if left else shown


def length_summary(lengths: Counter[int]) -> dict[str, float]:
    """Minimum, median, mean, 90 and 99 per cent points (of the nearest rank) and maximum."""
    total = sum(lengths.values())
    if not total:
        return {}
    ordered = sorted(lengths.items())

    def rank(share: float) -> int:
        left = max(1, -(-share * total // 1))
        for length, count in ordered:
            left -= count
            if left <= 0:
                return length
        return ordered[-1][0]

    mean = sum(length * count for length, count in ordered) / total
    return {
        "min": ordered[0][0],
        "median": rank(0.5),
        "mean": round(mean, 2),
        "p90": rank(0.9),
        "p99": rank(0.99),
        "max": ordered[-1][0],
    }


def length_histogram(lengths: Counter[int]) -> dict[str, int]:
    """Prompts per power of two of their length, from the shortest to the longest, empty buckets included."""
    if not lengths:
        return {}
    buckets: Counter[int] = Counter()
    for length, count in lengths.items():
        buckets[length.bit_length()] += count
    shown = range(min(buckets), max(buckets) + 1)
    return {f"{1 << bits >> 1}-{(1 << bits) - 1}": buckets[bits] for bits in shown}


class PrefixShare:
    """The share of prompt tokens in full blocks that an earlier prompt begins with too: what a prefix cache can save.

    At most `max_blocks` different prefixes are remembered; beyond that the share is a lower bound (`exact` is False).
    """

    def __init__(self, block_size: int, *, max_blocks: int = 500_000) -> None:
        self._block_size, self._max_blocks = block_size, max_blocks
        self._seen: set[int] = set()
        self._tokens = 0
        self._shared = 0
        self.exact = True

    def add(self, token_ids: Sequence[int]) -> None:
        size, seen = self._block_size, self._seen
        chain = 0
        self._tokens += len(token_ids)
        for start in range(0, len(token_ids) - size + 1, size):
            chain = hash((chain, *token_ids[start : start + size]))
            if chain in seen:
                self._shared += size
            elif len(seen) < self._max_blocks:
                seen.add(chain)
            else:
                self.exact = False
                return

    @property
    def share(self) -> float:
        return self._shared / self._tokens if self._tokens else 0.0


class _SpecialTokens:
    """Looks for the tokenizer's control tokens in the text of a row."""

    def __init__(self, tokens: Sequence[str]) -> None:
        longest_first = sorted((token for token in tokens if token), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def find(self, value: Any) -> str | None:
        if isinstance(value, str):
            match = self._pattern.search(value)
            return match[0] if match else None
        items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return next((found for item in items if (found := self.find(item)) is not None), None)
