"""The lines at the start of a run: the model, the settings in force, the first prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING

from batchjob.job.open import Job
from batchjob.job.settings import Settings
from batchjob.report.progress import duration, printable
from batchjob.sampling import SamplingParams

if TYPE_CHECKING:
    from batchjob.plan import Chunk
    from batchjob.prompts.tokenizer import Tokenizer
    from batchjob.records import Prompt

Echo = Callable[[str], None]


def describe_sampling(sampling: SamplingParams) -> str:
    """Returns the settings that differ from neutral, and always temperature and max_tokens."""
    neutral = asdict(SamplingParams())
    shown = {
        name: value
        for name, value in asdict(sampling).items()
        if value != neutral[name] and name not in ("temperature", "max_tokens")
    }
    limit = "what the context leaves" if sampling.max_tokens is None else sampling.max_tokens
    first = "greedy" if sampling.greedy else f"temperature {sampling.temperature:g}"
    return ", ".join([first, f"max_tokens {limit}", *(f"{name} {value}" for name, value in shown.items())])


def model_line(settings: Settings) -> str:
    """Returns the line before the model is loaded."""
    name = "the fake engine" if settings.model is None else settings.model.name
    return f"loading {name} ({settings.dtype} on {settings.device})"


def unknown_tokens_warning(settings: Settings, unknown: Sequence[int]) -> str | None:
    """Returns a warning if the model has more ids without a token than a vocabulary is padded by."""
    if len(unknown) <= settings.vocab_size // 50:
        return None
    return (
        f"warning: the tokenizer has no token for {len(unknown):,} of the model's {settings.vocab_size:,} ids, "
        "so they are never drawn; is it the tokenizer of this model?"
    )


def header_lines(job: Job, tokenizer: Tokenizer, engine_line: str, seconds: float) -> list[str]:
    """Returns the lines before the first step: the engine's first, then those that hold for the job."""
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
            f"warning: no --max-tokens: a row may generate up to {settings.max_model_len - 1:,} tokens before it is cut"
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


def show_first_prompt(job: Job, tokenizer: Tokenizer, echo: Echo, prompt: Prompt, chunk: Chunk) -> None:
    """Shows the first prompt as text and as tokens, for a check before a long run. It has been through the feeder, so a
    row that kills a tokenizer does not kill this process."""
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
