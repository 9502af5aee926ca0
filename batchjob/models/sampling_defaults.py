"""Sampling defaults that the model's author put into generation_config.json."""

from __future__ import annotations

from typing import Any

from batchjob.errors import BatchJobError, UnsupportedModelError
from batchjob.models.info import ModelInfo
from batchjob.sampling import SamplingParams, parse_params

_SAMPLED_ONLY = ("temperature", "top_k", "top_p", "min_p")
# Settings of Transformers' generate that change its output and that this engine does not have -> their neutral value.
_NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "bad_words_ids": (None, []),
    "begin_suppress_tokens": (None, []),
    "diversity_penalty": (None, 0, 0.0),
    "encoder_repetition_penalty": (None, 1, 1.0),
    "epsilon_cutoff": (None, 0, 0.0),
    "eta_cutoff": (None, 0, 0.0),
    "exponential_decay_length_penalty": (None,),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "guidance_scale": (None, 1, 1.0),
    "no_repeat_ngram_size": (None, 0),
    "num_beams": (None, 1),
    "sequence_bias": (None, {}, []),
    "suppress_tokens": (None, []),
    "top_h": (None,),
    "typical_p": (None, 1, 1.0),
}


def sampling_defaults(info: ModelInfo) -> dict[str, Any]:
    """Names and values of SamplingParams that hold where the user gives none.

    Without `do_sample` the model is meant to be greedy: temperature 0. `max_length` and `max_new_tokens` are not
    taken over: the default is what the context leaves. Raises UnsupportedModelError if the file makes no sense.
    """
    given = info.generation_config
    values: dict[str, Any] = {"repetition_penalty": given.get("repetition_penalty")}
    if given.get("do_sample"):
        values.update({name: given.get(name) for name in _SAMPLED_ONLY}, temperature=given.get("temperature", 1.0))
    else:
        values["temperature"] = 0.0
    try:
        defaults = parse_params(values)
        SamplingParams(**defaults)
    except BatchJobError as error:
        raise UnsupportedModelError(f"{info.name}: generation_config.json makes no sense: {error}") from None
    return defaults


def ignored_generation_settings(info: ModelInfo) -> tuple[str, ...]:
    """Settings of generation_config.json that change Transformers' own output and have no effect here: warn of them."""
    given = info.generation_config
    return tuple(
        f"{name} = {given[name]!r}"
        for name, neutral in _NOT_SUPPORTED.items()
        if name in given and given[name] not in neutral
    )
