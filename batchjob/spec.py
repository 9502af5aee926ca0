"""`JobSpec`: everything a user can ask of a run. The command line, the TOML file and `batchjob.run` all fill this.

Each field's `help` is the only text about it: `--help` and the docs are generated from it. `pinned` fields change the
results, so a resume with another value is refused (exit 78); the rest is free to change between runs.
Standard library only.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from batchjob.errors import UsageError
from batchjob.sampling import PARAM_NAMES, SamplingParams, parse_params

# Settings that are on, so that their flag turns them off.
NEGATED = ("prefix_caching", "cuda_graphs")
# The names in batchjob_kernels.attention.select, which imports torch.
ATTENTION_BACKENDS = ("triton", "flash", "gather", "invariant", "reference")

__all__ = ["JobSpec", "SamplingParams", "load_toml", "spec_fields"]


def _f(default: Any, help: str, *, pinned: bool = False, choices: tuple[str, ...] = (), section: str = "job") -> Any:
    return field(default=default, metadata={"help": help, "pinned": pinned, "choices": choices, "section": section})


def _s(name: str) -> Any:
    """A job-wide sampling setting; None means the model's generation_config decides, else the neutral value."""
    help_text = next(f.metadata["help"] for f in fields(SamplingParams) if f.name == name)
    empty: Any = () if name in ("stop", "stop_token_ids", "logit_bias") else None
    return field(default=empty, metadata={"help": help_text, "pinned": True, "choices": (), "section": "sampling"})


@dataclass(frozen=True, slots=True)
class JobSpec:
    # -- what to run on what
    model: str | None = _f(None, "Hub id, local directory, or .gguf file.", pinned=True, section="data")
    input: tuple[str, ...] = _f(
        (), "JSONL (plain, .gz, .zst, .xz, .bz2) or Parquet: file, directory or glob (repeatable).", section="data"
    )
    output: str | None = _f(None, "Output directory; rows go to OUTPUT/data.", section="data")
    revision: str | None = _f(
        None, "Branch, tag or commit of a hub model; pinned to a commit.", pinned=True, section="data"
    )
    # -- prompts
    prompt: str | None = _f(
        None,
        "Text column, a dotted path into one (body.text, turns.0), or a template over columns such as "
        "'Translate: {text}' ({{ escapes). [default: prompt]",
        pinned=True,
        section="prompt",
    )
    messages: str | None = _f(
        None,
        "Column of chat messages (lists of role and content), or a dotted path such as body.messages. "
        "[default: messages]",
        pinned=True,
        section="prompt",
    )
    prompt_token_ids: str | None = _f(
        None, "Column of token ids, sent as they are. [default: prompt_token_ids]", pinned=True, section="prompt"
    )
    system: str | None = _f(None, "System message put before each row; implies --chat.", pinned=True, section="prompt")
    chat: bool = _f(
        False, "Wrap each text prompt as one user turn in the model's chat template.", pinned=True, section="prompt"
    )
    chat_columns: str = _f(
        "all",
        "Columns that go to the chat template with the messages, of tools, documents, chat_template_kwargs, "
        "add_generation_prompt and continue_final_message: all that there are, none, or a comma-separated list.",
        pinned=True,
        section="prompt",
    )
    raw: bool = _f(False, "Send text without the chat template, and do not warn about it.", section="prompt")
    params: str | None = _f(
        None,
        "Column of per-row sampling settings; none for no such column. [default: params]",
        pinned=True,
        section="prompt",
    )
    id: str | None = _f(
        None, "Column that names rows in messages; duplicates are reported. [default: id]", section="prompt"
    )
    keep_columns: str = _f(
        "all",
        "Input columns carried to the output: all, none, or a comma-separated list.",
        pinned=True,
        section="prompt",
    )
    length_policy: str = _f(
        "error",
        "A prompt too long for max_model_len: fail the row, or cut its start or its end.",
        pinned=True,
        choices=("error", "truncate-left", "truncate-right"),
        section="prompt",
    )
    # -- sampling
    max_tokens: int | None = _s("max_tokens")
    min_tokens: int | None = _s("min_tokens")
    temperature: float | None = _s("temperature")
    top_p: float | None = _s("top_p")
    top_k: int | None = _s("top_k")
    min_p: float | None = _s("min_p")
    repetition_penalty: float | None = _s("repetition_penalty")
    presence_penalty: float | None = _s("presence_penalty")
    frequency_penalty: float | None = _s("frequency_penalty")
    seed: int | None = _s("seed")
    n: int | None = _s("n")
    stop: tuple[str, ...] = _s("stop")
    stop_token_ids: tuple[int, ...] = _s("stop_token_ids")
    include_stop: bool | None = _s("include_stop")
    ignore_eos: bool | None = _s("ignore_eos")
    logit_bias: tuple[tuple[int, float], ...] = _s("logit_bias")
    # -- engine
    engine: str = _f(
        "transformers",
        "transformers runs the model; fake makes up short answers without one, to try a job.",
        pinned=True,
        choices=("transformers", "fake"),
        section="engine",
    )
    device: str = _f(
        "auto", "Exactly one device: cpu, cuda or cuda:N. [default: what --devices says]", section="engine"
    )
    devices: str = _f(
        "auto",
        "One worker for each of these devices: auto (every visible GPU, else the CPU), all (the same, but an error "
        "without a GPU), or a list such as 0,1 or cpu,cpu.",
        section="engine",
    )
    dtype: str = _f(
        "auto",
        "auto (the checkpoint's on a GPU, float32 on a CPU), float32, bfloat16 or float16.",
        pinned=True,
        choices=("auto", "float32", "bfloat16", "float16"),
        section="engine",
    )
    max_model_len: int | None = _f(
        None, "Longest prompt plus output, in tokens. [default: the model's]", pinned=True, section="engine"
    )
    max_num_seqs: int | None = _f(None, "Most sequences in one step. [default: from memory]", section="engine")
    max_num_batched_tokens: int | None = _f(
        None,
        "Most tokens computed in one step; longer prompts are computed in parts. [default: from the device]",
        section="engine",
    )
    num_threads: int | None = _f(
        None,
        "CPU threads of each worker's engine. [default: one per core, shared among the workers of one CPU]",
        section="engine",
    )
    block_size: int = _f(16, "Tokens per KV block.", section="engine")
    kv_cache_memory: str | None = _f(
        None, "Memory for the KV cache, such as 2GiB. [default: from free memory]", section="engine"
    )
    kv_cache_dtype: str = _f(
        "auto",
        "Type of the keys and values kept: auto (the model's dtype) or fp8 (e4m3: half the memory, and other results; "
        "some models do badly with it).",
        pinned=True,
        choices=("auto", "fp8"),
        section="engine",
    )
    attention_backend: str = _f(
        "auto",
        "What computes attention: auto (triton on a GPU, gather on a CPU), or one of "
        f"{', '.join(ATTENTION_BACKENDS)}; an error says why one cannot be used.",
        choices=("auto", *ATTENTION_BACKENDS),
        section="engine",
    )
    cuda_graphs: bool = _f(True, "Replay decode steps as CUDA graphs.", section="engine")
    async_scheduling: str = _f(
        "auto",
        "Start a step before the tokens of the last one are known: auto (on a GPU), on or off.",
        choices=("auto", "on", "off"),
        section="engine",
    )
    admission_interval: int | None = _f(
        None,
        "Steps between two admissions of new rows while --max-num-seqs or the KV cache is nearly full: steps with prompts in them "
        "cannot be CUDA graphs. [default: 8 with CUDA graphs, else 1]",
        section="engine",
    )
    decode_steps_per_launch: int = _f(
        1,
        "Decode steps that are started at once, without waiting for the tokens of each. Tokens after the end of a row are "
        "computed and discarded; steps with stop strings run one by one.",
        section="engine",
    )
    deterministic: bool = _f(
        False,
        "The tokens of a row do not depend, in any bit, on what else is in a step. Slower; see the README.",
        pinned=True,
        section="engine",
    )
    tensor_parallel: int = _f(
        1, "Split the model over so many processes, for a model that does not fit one device.", section="engine"
    )
    prefix_caching: bool = _f(True, "Reuse the KV blocks of prompts that start alike.", section="engine")
    order: str = _f(
        "auto",
        "Order of rows inside the open chunks: auto (shared prefixes together, long rows first), input, prefix or length.",
        choices=("auto", "input", "prefix", "length"),
        section="engine",
    )
    # -- job
    num_shards: int = _f(1, "Number of processes that share this output; each starts on its own chunks.", section="job")
    shard_id: int = _f(0, "Which of them this one is, from 0.", section="job")
    steal: bool = _f(
        False,
        "When this shard is finished, take chunks that other shards have not begun. Give it to all of them.",
        section="job",
    )
    lease: bool = _f(
        True,
        "Refuse to run beside another live process on the same shard (exit 69). Without it rows may be computed twice, "
        "and are written once all the same.",
        section="job",
    )
    limit: int | None = _f(None, "Only the first N rows.", pinned=True, section="job")
    extend: bool = _f(
        False,
        "Add input files that are new since the job was planned, after its rows; finished files stay.",
        section="job",
    )
    chunk_rows: int | None = _f(
        None, "Rows per chunk, the unit of commit. [default: from the number of rows]", pinned=True, section="job"
    )
    output_token_ids: bool = _f(False, "Add a column with the token ids of each output.", pinned=True, section="job")
    flush_interval: float = _f(
        5.0,
        "Seconds between fsyncs of finished rows (a power loss takes at most these; a kill takes none).",
        section="job",
    )
    full_disk_timeout: float = _f(
        300.0,
        "Seconds to wait for room when the disk is full, before the exit with code 74; finished rows wait in memory.",
        section="job",
    )
    max_error_rate: float = _f(
        0.01, "Share of failed rows above which the exit code is 65. All rows are written in any case.", section="job"
    )
    max_row_bytes: int = _f(64 * 1024 * 1024, "A longer input line becomes a row error.", pinned=True, section="job")
    save_partial: int = _f(
        64,
        "A row that a stop cuts off keeps its output tokens if it has at least this many, and the next run continues "
        "after them; 0 keeps none.",
        section="job",
    )
    drain_timeout: float | None = _f(
        None,
        "Seconds to finish running rows after --drain-signal (after SIGTERM or Ctrl-C at most 15). "
        "[default: the time left minus 60, or 120]",
        section="job",
    )
    drain_signal: str = _f(
        "SIGUSR1", "The signal that announces the end.", choices=("SIGUSR1", "SIGUSR2"), section="job"
    )
    time_limit: str = _f(
        "auto",
        "Stop in time for this end: auto (SLURM's, where there is one), none, or a time such as 3h30m or 12:00:00.",
        section="job",
    )
    requeue: str = _f(
        "none",
        "In SLURM, after a warning or at the time limit: scontrol puts the task back in the queue, exit relies on the "
        "site's RequeueExit=75, none on the person or program that started it.",
        choices=("scontrol", "exit", "none"),
        section="job",
    )
    stall_timeout: float = _f(
        600.0,
        "Seconds without a step after which the worker counts as hung: its stacks are kept and it is restarted. 0: never.",
        section="job",
    )
    load_timeout: float = _f(3600.0, "The same for loading the model.", section="job")
    progress: str = _f(
        "auto",
        "auto (a bar on a terminal, else a line per interval), bar, lines or none.",
        choices=("auto", "bar", "lines", "none"),
        section="job",
    )

    def __post_init__(self) -> None:
        checks = (
            (self.num_shards >= 1, f"--num-shards must be at least 1, not {self.num_shards}"),
            (
                0 <= self.shard_id < self.num_shards,
                f"--shard-id must be from 0 to {self.num_shards - 1}, not {self.shard_id}",
            ),
            (
                not (self.raw and (self.chat or self.system is not None)),
                "--raw and --chat (or --system) exclude each other",
            ),
            (
                not (self.extend and self.limit is not None),
                "--extend and --limit exclude each other: new files come after the limit",
            ),
            (
                self.device == "auto" or self.devices == "auto",
                "--device and --devices exclude each other: --device is for exactly one",
            ),
            (
                self.num_threads is None or 1 <= self.num_threads <= 1024,
                f"--num-threads must be from 1 to 1024, not {self.num_threads}",
            ),
            (self.block_size >= 1, f"--block-size must be at least 1, not {self.block_size}"),
            (self.limit is None or self.limit >= 0, f"--limit must be at least 0, not {self.limit}"),
            (
                self.chunk_rows is None or self.chunk_rows >= 1,
                f"--chunk-rows must be at least 1, not {self.chunk_rows}",
            ),
            (
                self.max_num_seqs is None or self.max_num_seqs >= 1,
                f"--max-num-seqs must be at least 1, not {self.max_num_seqs}",
            ),
            (
                self.max_num_batched_tokens is None or self.max_num_batched_tokens >= 1,
                f"--max-num-batched-tokens must be at least 1, not {self.max_num_batched_tokens}",
            ),
            (
                self.max_model_len is None or self.max_model_len >= 2,
                f"--max-model-len must be at least 2, not {self.max_model_len}",
            ),
            (
                1 <= self.decode_steps_per_launch <= 64,
                f"--decode-steps-per-launch must be from 1 to 64, not {self.decode_steps_per_launch}",
            ),
            (
                self.admission_interval is None or self.admission_interval >= 1,
                f"--admission-interval must be at least 1, not {self.admission_interval}",
            ),
            (self.tensor_parallel >= 1, f"--tensor-parallel must be at least 1, not {self.tensor_parallel}"),
            (
                not (self.engine == "fake" and self.tensor_parallel > 1),
                "--tensor-parallel splits a model; --engine fake has none: leave one of them out",
            ),
            (
                not (self.deterministic and self.tensor_parallel > 1),
                "--deterministic and --tensor-parallel exclude each other: it is not proven for sums over processes",
            ),
            (0 <= self.max_error_rate <= 1, f"--max-error-rate must be between 0 and 1, not {self.max_error_rate}"),
            (self.flush_interval > 0, f"--flush-interval must be above 0, not {self.flush_interval}"),
            (
                self.drain_timeout is None or self.drain_timeout >= 0,
                f"--drain-timeout must be at least 0, not {self.drain_timeout}",
            ),
            (self.save_partial >= 0, f"--save-partial must be at least 0, not {self.save_partial}"),
            (self.full_disk_timeout >= 0, f"--full-disk-timeout must be at least 0, not {self.full_disk_timeout}"),
            (self.max_row_bytes >= 1, f"--max-row-bytes must be at least 1, not {self.max_row_bytes}"),
            (self.stall_timeout >= 0, f"--stall-timeout must be at least 0, not {self.stall_timeout}"),
            (self.load_timeout >= 0, f"--load-timeout must be at least 0, not {self.load_timeout}"),
        )
        for good, message in checks:
            if not good:
                raise UsageError(message)
        for f in fields(self):
            choices = f.metadata["choices"]
            if choices and getattr(self, f.name) not in choices:
                raise UsageError(f"{flag(f.name)} must be one of {', '.join(choices)}, not {getattr(self, f.name)!r}")
        if self.output is not None:
            refuse_url(self.output, "--output")
        parse_memory(self.kv_cache_memory)
        SamplingParams(**self.given_sampling())

    @property
    def kv_cache_bytes(self) -> int | None:
        """`kv_cache_memory` in bytes."""
        return parse_memory(self.kv_cache_memory)

    def given_sampling(self) -> dict[str, Any]:
        """The job-wide sampling settings that the user gave, checked."""
        given = {name: getattr(self, name) for name in PARAM_NAMES}
        return parse_params({name: value for name, value in given.items() if value is not None and value != ()})

    def replace(self, **changes: Any) -> JobSpec:
        return replace(self, **changes)


def spec_fields() -> tuple[Field[Any], ...]:
    return fields(JobSpec)


def flag(name: str) -> str:
    """The command-line spelling of a field."""
    return ("--no-" if name in NEGATED else "--") + name.replace("_", "-")


_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([kmgt]i?)?b?\s*")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # a Path has one slash left of two


def refuse_url(path: str | Path, name: str) -> None:
    """Raises UsageError for a URL where a local path is wanted: it would become a local directory of that name. The
    same for a newline or another control character, which breaks every command and script that names the path."""
    if (bad := _CONTROL.search(str(path))) is not None:
        raise UsageError(
            f"{name} {str(path)!r} has a control character ({bad.group()!r}): often a mistake in quoting. Choose a path "
            "without, or rename the directory if it is there already"
        )
    if _URL.match(str(path)):
        scheme = str(path).partition(":")[0]
        remedy = "leave the scheme out" if scheme == "file" else "use a local path and copy what is in it"
        raise UsageError(f"{name} {path}: only local paths are written and read here; {remedy}")


def parse_memory(text: str | None, *, name: str = "--kv-cache-memory") -> int | None:
    """Bytes from "2GiB", "500MB", "1e9". Raises UsageError."""
    if text is None:
        return None
    match = _SIZE.fullmatch(text.lower())
    if match is None:
        raise UsageError(f"{name} must be a size such as 2GiB or 500MB, not {text!r}")
    size = int(float(match[1]) * _UNITS[match[2] or ""])
    if size < 1:
        raise UsageError(f"{name} must be above 0")
    return size


def load_toml(path: str | Path) -> dict[str, Any]:
    """The fields that a TOML job file sets. Names are the flags', with `-` or `_`. Raises UsageError.

    Relative `input`, `output` and local `model` paths are taken from the current directory, as the flags' are.
    """
    try:
        data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"job file {path} does not exist") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"job file {path} cannot be read: {error}") from None
    return spec_values(data, source=str(path))


def spec_values(data: Mapping[str, Any], *, source: str) -> dict[str, Any]:
    """Checks names and types of job settings and returns them as field values of JobSpec."""
    known = {f.name: f for f in fields(JobSpec)}
    out: dict[str, Any] = {}
    for key, value in data.items():
        name = key.replace("-", "_")
        if name not in known:
            raise UsageError(f"{source}: unknown setting {key!r}; `batchjob run --help` lists them")
        out[name] = _spec_value(name, str(known[name].type), value, source)
    return out


def _spec_value(name: str, kind: str, value: Any, source: str) -> Any:
    if name in PARAM_NAMES:
        try:
            return parse_params({name: value}).get(name, value)
        except UsageError as error:
            raise UsageError(f"{source}: {error}") from None
    if name == "input":
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
            raise UsageError(f"{source}: input must be a string or a list of strings")
        return tuple(items)
    if name in ("keep_columns", "chat_columns") and isinstance(value, list):
        value = ",".join(map(str, value))
    if kind.startswith("float") and type(value) is int:
        value = float(value)
    wanted = {"str": str, "int": int, "float": float, "bool": bool}[kind.split(" ")[0]]
    if type(value) is not wanted:
        raise UsageError(f"{source}: {name} must be of type {wanted.__name__}, not {value!r}")
    return value
