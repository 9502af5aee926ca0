"""Resolves a user's `JobSpec` into the settings of a job: model, sampling, lengths, and the fingerprint of them all.

They are frozen in the job's manifest; a resume resolves them again and compares.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchjob import __version__
from batchjob.errors import UsageError
from batchjob.job.devices import only_device
from batchjob.sampling import SamplingParams
from batchjob.spec import JobSpec
from batchjob.store.columns import OutputColumns

if TYPE_CHECKING:
    from batchjob.models import ModelInfo

FAKE_MAX_MODEL_LEN = 8192
FAKE_EOS_TOKEN_IDS = (2,)
FAKE_VOCAB_SIZE = 65_536


@dataclass(frozen=True, slots=True)
class Settings:
    """The resolved settings of a job. `sampling.seed` is always None: a seed of the job is not a seed of each row."""

    model: ModelInfo | None  # None with the fake engine
    sampling: SamplingParams
    job_seed: int
    max_model_len: int
    dtype: str
    device: str
    eos_token_ids: tuple[int, ...]

    @property
    def known_vocab_size(self) -> int | None:
        """Ids below this are the model's; None where its config does not say so."""
        if self.model is None:
            return FAKE_VOCAB_SIZE
        config = self.model.config
        found = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
        return int(found) if found else None

    @property
    def vocab_size(self) -> int:
        """`known_vocab_size`, or more than any model has: the engine, which has the model, then looks again."""
        return self.known_vocab_size or 1 << 31

    def special_tokens(self) -> Mapping[str, int]:
        """Text -> id of the tokens that appear in no output text. Reads the tokenizer's file."""
        from batchjob.models import special_tokens

        return {} if self.model is None else special_tokens(Path(self.model.path))

    def row_sampling(self) -> SamplingParams:
        """The settings of a row without its own: `sampling`, special tokens among its stop strings as ids."""
        return self.sampling.with_special_stops(self.special_tokens()) if self.sampling.stop else self.sampling

    @property
    def has_chat_template(self) -> bool:
        return self.model is None or bool(self.model.template_digest)

    def to_json(self) -> dict[str, Any]:
        """Returns the record in the manifest, from which a resume starts."""
        model = self.model
        return {
            "model": None if model is None else {"name": model.name, "path": model.path, "source": model.source},
            "revision": None if model is None else model.revision,
            "sampling": asdict(self.sampling),
            "job_seed": self.job_seed,
            "max_model_len": self.max_model_len,
            "dtype": self.dtype,
            "eos_token_ids": list(self.eos_token_ids),
        }


def resolve_settings(spec: JobSpec, frozen: Mapping[str, Any] | None = None) -> Settings:
    """Finds the model and decides every setting. `frozen` is `Settings.to_json` of the job being resumed.

    Reads files only: no torch, no weights. Raises UsageError, UnsupportedModelError or StoppedEarlyError (hub down).
    """
    given = spec.given_sampling()
    job_seed = given.pop("seed", 0)
    device, _ = only_device(spec)
    if spec.engine == "fake":
        return Settings(
            model=None,
            sampling=SamplingParams(**given),
            job_seed=job_seed,
            max_model_len=spec.max_model_len or FAKE_MAX_MODEL_LEN,
            dtype="float32",
            device="cpu",
            eos_token_ids=FAKE_EOS_TOKEN_IDS,
        )
    from batchjob.models import resolve_model, sampling_defaults

    if not spec.model:
        raise UsageError("give --model: a hub id, a local directory or a .gguf file (or --engine fake to try a job)")
    revision = spec.revision
    if frozen is not None and (frozen.get("model") or {}).get("name") == spec.model and revision is None:
        revision = frozen.get("revision")
    model = resolve_model(spec.model, revision=revision)
    if spec.max_model_len is not None and spec.max_model_len > model.max_model_len:
        raise UsageError(
            f"--max-model-len {spec.max_model_len} is more than the {model.max_model_len} positions of {model.name}"
        )
    dtype = spec.dtype
    if dtype == "auto":
        dtype = frozen["dtype"] if frozen else "float32" if device == "cpu" else model.checkpoint_dtype
    sampling = SamplingParams(**{**sampling_defaults(model), **given})
    settings = Settings(
        model=model,
        sampling=sampling,
        job_seed=job_seed,
        max_model_len=spec.max_model_len or model.max_model_len,
        dtype=dtype,
        device=device,
        eos_token_ids=model.eos_token_ids,
    )
    for token in (*sampling.stop_token_ids, *(token for token, _ in sampling.logit_bias)):
        if token >= settings.vocab_size:
            flag = "--stop-token-ids" if token in sampling.stop_token_ids else "--logit-bias"
            raise UsageError(f"{flag}: token id {token} is not below the vocabulary size {settings.vocab_size}")
    return settings


def fingerprint(spec: JobSpec, settings: Settings, *, prompt: Mapping[str, Any], chunk_rows: int) -> dict[str, Any]:
    """Returns all that changes results or the layout of the output; a resume where it differs is refused."""
    model, sampling = settings.model, settings.row_sampling()
    return {
        "engine": spec.engine,
        "model": None
        if model is None
        else {
            "config": model.config_digest,
            "weights": model.weights_digest,
            "tokenizer": model.tokenizer_digest,
            "chat_template": model.template_digest,
        },
        "dtype": settings.dtype,
        "max_model_len": settings.max_model_len,
        "eos_token_ids": list(settings.eos_token_ids),
        "sampling": {**asdict(sampling), "seed": settings.job_seed},
        # Rows with settings of their own start from the stop strings as they were given.
        **({"stop": list(settings.sampling.stop)} if prompt.get("params") and sampling != settings.sampling else {}),
        "prompt": dict(prompt),
        "length_policy": spec.length_policy,
        "keep_columns": spec.keep_columns,
        **OutputColumns.asked(spec).fingerprint(),
        "limit": spec.limit,
        "max_row_bytes": spec.max_row_bytes,
        "chunk_rows": chunk_rows,
        **({"kv_cache_dtype": spec.kv_cache_dtype} if spec.kv_cache_dtype != "auto" else {}),
        **({"deterministic": _bits(spec, settings)} if spec.deterministic else {}),
    }


def _bits(spec: JobSpec, settings: Settings) -> dict[str, Any]:
    """Returns the facts that decide the last bit of a result: hardware, versions, threads."""
    is_cpu = settings.device == "cpu"
    return {
        "attention_backend": spec.attention_backend,
        "device": _cpus(spec.num_threads) if is_cpu else _gpu_names(),
        "batchjob": __version__,
        **{package: _version(package) for package in ("torch", "transformers", "triton")},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpus(num_threads: int | None) -> str:
    """--num-threads, or OMP_NUM_THREADS, in which each of several workers on one CPU gets its share."""
    threads = num_threads or os.environ.get("OMP_NUM_THREADS")
    return f"{platform.machine()}, {len(os.sched_getaffinity(0))} CPUs" + (f", {threads} threads" if threads else "")


def _gpu_names() -> str:
    """The kinds of GPU in this machine, as the driver names them."""
    names = set()
    for path in Path("/proc/driver/nvidia/gpus").glob("*/information"):
        found = re.search(r"^Model:\s*(.+)$", path.read_text(), re.MULTILINE)
        names.add(found[1].strip() if found else "unknown")
    return ", ".join(sorted(names)) or "cuda"
