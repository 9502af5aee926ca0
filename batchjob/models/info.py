"""`ModelInfo`: the facts that a model's files state, read from a local directory without loading anything."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchjob.errors import UnsupportedModelError
from batchjob.models import tokenizer_files
from batchjob.models.pointers import refuse_pointer
from batchjob.models.weights import Weights, read_weights, unused_weights, weights_stamp

_MAX_CONFIG_BYTES = 16 * 2**20
# Entries of config.json that say who wrote it, not what the model is.
_NO_EFFECT = {"_name_or_path", "transformers_version"}
# The names that different families give to the longest position.
_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx")
# Where tools that quantise a model say so.
_QUANTISED = ("quantization_config", "compression_config", "quantization")
_QUANTISED_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
# A head for something else than the next token: LlamaForSequenceClassification, BertForMaskedLM, Qwen2ForRewardModel.
_OTHER_KIND = re.compile(r"For(?!CausalLM|ConditionalGeneration)[A-Z]\w*$")
_DTYPE_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model in a local directory. The digests go into a job's fingerprint: a resume with another one is refused."""

    name: str  # as the user gave it
    path: str  # absolute directory that Transformers loads
    source: str  # "hub" | "directory" | "gguf"
    revision: str | None  # commit of a hub model
    config: Mapping[str, Any]  # config.json
    generation_config: Mapping[str, Any]  # generation_config.json, or empty
    max_model_len: int  # most tokens of prompt plus output that the model has positions for
    eos_token_ids: tuple[int, ...]  # of generation_config, config and tokenizer together, sorted
    checkpoint_dtype: str  # "float32" | "bfloat16" | "float16" | ...
    config_digest: str  # of config.json, without the entries that say who wrote it
    weights_digest: str  # of every weight file's header and of samples of its tensors (see `weights`)
    tokenizer_digest: str  # of the files that turn text into tokens
    template_digest: str  # of the chat template; "" without one
    weight_files: tuple[str, ...] = ()
    weights_stamp: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def text_digest(self) -> str:
        """The digest of all files that turn a row into tokens: `tokenizer_files.text_digest` when they are loaded."""
        return tokenizer_files.joined(self.tokenizer_digest, self.template_digest)

    def refuse_changed_files(self) -> None:
        """Checks the files again, once the model is loaded. Raises UnsupportedModelError if its weights or its
        configuration may be others than the digests were made of."""
        path = Path(self.path)
        if weights_stamp(path, self.weight_files) != self.weights_stamp:
            raise UnsupportedModelError(f"the weights in {self.path} changed while they were loaded; run again")
        if _config_digest(read_json(path / "config.json")) != self.config_digest:
            raise UnsupportedModelError(f"{path / 'config.json'} changed while the model was loaded; run again")


def read_model(directory: Path, *, name: str, source: str, revision: str | None = None) -> ModelInfo:
    """Reads and checks the files of a model. Raises UnsupportedModelError with what is wrong and what to do."""
    if not (directory / "config.json").is_file():
        raise UnsupportedModelError(
            f"{name} holds no config.json, so it is not a model that Transformers can load"
            + ("; it is an adapter: merge it into its model" if (directory / "adapter_config.json").is_file() else "")
            + (f"; to use a GGUF file, name the file itself: {gguf[0]}" if (gguf := _gguf_files(directory)) else "")
        )
    config = read_json(directory / "config.json")
    generation_config = _read_optional(directory / "generation_config.json")
    tokenizer_config = _read_optional(directory / "tokenizer_config.json")
    for file_name, content in (("config.json", config), ("tokenizer_config.json", tokenizer_config)):
        _refuse_remote_code(name, file_name, content)
    _refuse_quantised(directory, name, config)
    _refuse_other_kind(name, config)
    _refuse_other_weights(directory, name, config)
    weights = read_weights(directory, name=name)
    tokenizer_eos = tokenizer_files.eos_token_id(directory, tokenizer_config)
    eos = {*_ids(generation_config), *_ids(config), *_ids(_text_config(config))}
    if tokenizer_eos is not None:
        eos.add(tokenizer_eos)
    return ModelInfo(
        name=name,
        path=str(directory.resolve()),
        source=source,
        revision=revision,
        config=config,
        generation_config=generation_config,
        max_model_len=_max_model_len(name, config, tokenizer_config),
        eos_token_ids=tuple(sorted(eos)),
        checkpoint_dtype=_checkpoint_dtype(config, weights),
        config_digest=_config_digest(config),
        weights_digest=weights.digest,
        tokenizer_digest=tokenizer_files.digest(directory, tokenizer_config),
        template_digest=tokenizer_files.template_digest(directory, tokenizer_config),
        weight_files=weights.files,
        weights_stamp=weights.stamp,
        warnings=tuple(filter(None, [unused_weights(directory)])),
    )


def _config_digest(config: Mapping[str, Any]) -> str:
    settings = {key: value for key, value in config.items() if key not in _NO_EFFECT}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of bounded size. Raises UnsupportedModelError."""
    refuse_pointer(path)
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise UnsupportedModelError(f"{path} is larger than {_MAX_CONFIG_BYTES} bytes, so it is no configuration")
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UnsupportedModelError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise UnsupportedModelError(f"{path} is not a JSON object")
    return content


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _gguf_files(directory: Path) -> list[str]:
    return sorted(str(path) for path in directory.glob("*.gguf"))


def _refuse_remote_code(name: str, file_name: str, content: Mapping[str, Any]) -> None:
    if content.get("auto_map"):
        raise UnsupportedModelError(
            f"{name}: {file_name} asks for Python code from the model repository (auto_map), which batchjob never "
            "runs. If Transformers has this family built in, copy the model to a directory, take the auto_map entry "
            "out of the file, and give that directory as --model"
        )


def _refuse_quantised(directory: Path, name: str, config: Mapping[str, Any]) -> None:
    found = None
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key in _QUANTISED:
            if value := part.get(key):
                method = value.get("quant_method") if isinstance(value, dict) else None
                found = found or method or f"{key} in config.json"
    found = found or next((file_name for file_name in _QUANTISED_FILES if (directory / file_name).is_file()), None)
    if found:
        raise UnsupportedModelError(
            f"{name} has quantised weights ({found}), which batchjob does not run. Use the model in bfloat16, float16 "
            "or float32 that it was made from"
        )


def _refuse_other_kind(name: str, config: Mapping[str, Any]) -> None:
    """Raises UnsupportedModelError for a classifier or an encoder, which may have every tensor of a language model."""
    names = config.get("architectures")
    kinds = [kind for kind in names if isinstance(kind, str)] if isinstance(names, list) else []
    if kinds and all(_OTHER_KIND.search(kind) for kind in kinds):
        raise UnsupportedModelError(
            f"{name} is a {', '.join(kinds)} (architectures in config.json), not a model that writes text. Use the "
            "causal language model that it was made from, or correct the entry if it is one"
        )


def _refuse_other_weights(directory: Path, name: str, config: Mapping[str, Any]) -> None:
    """Raises UnsupportedModelError for settings that make Transformers load other weights than the files checked
    here."""
    if (directory / "adapter_config.json").is_file():
        raise UnsupportedModelError(
            f"{name} has an adapter (adapter_config.json), which batchjob does not apply. Merge it into the model and "
            "save that (merge_and_unload in PEFT), or take adapter_config.json out to run the model without it"
        )
    if config.get("transformers_weights"):
        raise UnsupportedModelError(
            f"{name}: config.json names its own weights (transformers_weights = {config['transformers_weights']!r}); "
            "take the entry out and name the file model.safetensors"
        )


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language part of a model that also takes pictures or sound; the config itself elsewhere."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def _ids(config: Mapping[str, Any]) -> Iterable[int]:
    value = config.get("eos_token_id")
    items = value if isinstance(value, list) else [value]
    return [item for item in items if type(item) is int and item >= 0]


def _max_model_len(name: str, config: Mapping[str, Any], tokenizer_config: Mapping[str, Any]) -> int:
    for source in (_text_config(config), config):
        for key in _LENGTH_KEYS:
            value = source.get(key)
            if type(value) is int and value > 0:
                return value
    value = tokenizer_config.get("model_max_length")
    if isinstance(value, int) and 0 < value < 10**9:  # Transformers writes 1e30 for "not known"
        return value
    raise UnsupportedModelError(
        f"{name}: config.json does not say how many positions the model has (none of {', '.join(_LENGTH_KEYS)})"
    )


def _checkpoint_dtype(config: Mapping[str, Any], weights: Weights) -> str:
    for source in (_text_config(config), config):
        for key in ("dtype", "torch_dtype"):
            value = source.get(key)
            if isinstance(value, str) and value != "auto":
                return value.removeprefix("torch.")
    return _DTYPE_NAMES.get(weights.main_dtype, weights.main_dtype)
