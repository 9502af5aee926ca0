"""Sampling settings of a job or a row: names, ranges, defaults. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from batchjob.errors import UsageError

MAX_SAMPLES = 10_000  # samples per row: the requests of one row are made at once
# Logits are edited in float32, where infinity less infinity is no number: beyond these bounds a setting could make
# logits that the model is then blamed for. What they allow adds up to less than the largest float32 number.
MAX_FACTOR = 1e30
MAX_BIAS = 1e38  # of one token, all entries for it together; below zero there is no bound, that bans the token


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one row is sampled. Order of work on the logits: penalties and logit_bias, end tokens masked before
    min_tokens, temperature, top_k, top_p, min_p, then a counter-based Gumbel draw. temperature 0 is greedy.
    """

    temperature: float = _option(0.0, "Sampling temperature; 0 takes the most likely token.")
    top_k: int = _option(0, "Keep the k most likely tokens; 0 keeps all.")
    top_p: float = _option(1.0, "Keep the smallest set of tokens whose probability reaches p.")
    min_p: float = _option(0.0, "Drop tokens less likely than this share of the most likely one.")
    repetition_penalty: float = _option(
        1.0, "Divide (multiply if negative) the logits of tokens seen in prompt or output."
    )
    presence_penalty: float = _option(0.0, "Subtract this from the logit of each token already in the output.")
    frequency_penalty: float = _option(0.0, "Subtract this times its count from the logit of each token in the output.")
    seed: int | None = _option(None, "Seed of the random numbers; rows with one prompt and one row seed agree.")
    n: int = _option(1, "Samples per row; they share the prompt's KV blocks.")
    max_tokens: int | None = _option(None, "Most output tokens per sample; default: what the context leaves.")
    min_tokens: int = _option(0, "No end token or stop string ends the row before this many output tokens.")
    stop: tuple[str, ...] = _option((), "Stop string, cut from the output (repeatable).")
    stop_token_ids: tuple[int, ...] = _option((), "Token id that ends the output (repeatable).")
    include_stop: bool = _option(False, "Keep the stop string in the output.")
    ignore_eos: bool = _option(False, "Go on past the model's end tokens.")
    logit_bias: tuple[tuple[int, float], ...] = _option((), "Add to the logit of a token, as ID=BIAS (repeatable).")

    def __post_init__(self) -> None:
        problem = _problem(self)
        if problem:
            raise UsageError(problem)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def override(self, values: Mapping[str, Any]) -> SamplingParams:
        """These settings with a row's `params` on top. Raises UsageError on an unknown name, type or range.

        None means "not given" and keeps the job's value.
        """
        return replace(self, **parse_params(values))

    def with_special_stops(self, special_tokens: Mapping[str, int]) -> SamplingParams:
        """A stop string that is a special token becomes a stop token id: special tokens are in no output text.

        For settings that nothing is put on top of any more: `stop` and `stop_token_ids` are overridden separately.
        """
        found = [text for text in self.stop if text in special_tokens]
        if not found:
            return self
        ids = dict.fromkeys((*self.stop_token_ids, *(special_tokens[text] for text in found)))
        return replace(self, stop=tuple(text for text in self.stop if text not in found), stop_token_ids=tuple(ids))


PARAM_NAMES: tuple[str, ...] = tuple(f.name for f in fields(SamplingParams))
_INTS = {"top_k", "n", "max_tokens", "min_tokens", "seed"}
_FLOATS = {"temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"}
_BOOLS = {"ignore_eos", "include_stop"}


def parse_params(values: Mapping[str, Any]) -> dict[str, Any]:
    """Checks names and types of sampling settings that come from JSON, TOML or Parquet; None values are left out."""
    out: dict[str, Any] = {}
    for name, value in values.items():
        if name not in PARAM_NAMES:
            raise UsageError(f"unknown sampling parameter {name!r}; known: {', '.join(PARAM_NAMES)}")
        if value is None:
            continue
        out[name] = _convert(name, value)
    return out


def _convert(name: str, value: Any) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if name in _INTS:
        if not is_number or not math.isfinite(value) or value != int(value):
            raise UsageError(f"{name} must be a whole number, not {value!r}")
        return int(value)
    if name in _FLOATS:
        if not is_number or not math.isfinite(value):
            raise UsageError(f"{name} must be a finite number, not {value!r}")
        return float(value)
    if name in _BOOLS:
        if not isinstance(value, bool):
            raise UsageError(f"{name} must be true or false, not {value!r}")
        return value
    if name == "stop":
        items = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list | tuple) else None
        if items is None or not all(isinstance(item, str) and item for item in items):
            raise UsageError(f"stop must be a non-empty string or a list of them, not {value!r}")
        return items
    if name == "stop_token_ids":
        if not isinstance(value, list | tuple) or not all(type(item) is int and item >= 0 for item in value):
            raise UsageError(f"stop_token_ids must be a list of token ids, not {value!r}")
        return tuple(value)
    assert name == "logit_bias"
    pairs = value.items() if isinstance(value, Mapping) else value
    try:
        bias = tuple(sorted((int(token), float(amount)) for token, amount in pairs))
    except (TypeError, ValueError):
        raise UsageError(f"logit_bias must map token ids to numbers, not {value!r}") from None
    if any(token < 0 or not math.isfinite(amount) for token, amount in bias):
        raise UsageError("logit_bias needs token ids of at least 0 and finite numbers")
    return bias


def _problem(p: SamplingParams) -> str | None:
    if p.temperature < 0:
        return f"temperature must be at least 0, not {p.temperature}"
    if p.top_k < 0:
        return f"top_k must be at least 0 (0 keeps all tokens), not {p.top_k}"
    if not 0 < p.top_p <= 1:
        return f"top_p must be above 0 and at most 1, not {p.top_p}"
    if not 0 <= p.min_p <= 1:
        return f"min_p must be between 0 and 1, not {p.min_p}"
    if not 1 / MAX_FACTOR <= p.repetition_penalty <= MAX_FACTOR:
        return f"repetition_penalty must be from {1 / MAX_FACTOR:g} to {MAX_FACTOR:g}, not {p.repetition_penalty}"
    for name in ("temperature", "presence_penalty", "frequency_penalty"):
        if not abs(getattr(p, name)) <= MAX_FACTOR:
            return f"{name} must be between -{MAX_FACTOR:g} and {MAX_FACTOR:g}, not {getattr(p, name)}"
    if p.logit_bias and (problem := _bias_problem(p.logit_bias)):
        return problem
    if not 1 <= p.n <= MAX_SAMPLES:
        return f"n must be between 1 and {MAX_SAMPLES:,}, not {p.n}"
    if p.max_tokens is not None and p.max_tokens < 1:
        return f"max_tokens must be at least 1, not {p.max_tokens}"
    if p.min_tokens < 0:
        return f"min_tokens must be at least 0, not {p.min_tokens}"
    if p.max_tokens is not None and p.min_tokens > p.max_tokens:
        return f"min_tokens ({p.min_tokens}) is above max_tokens ({p.max_tokens})"
    return None


def _bias_problem(bias: tuple[tuple[int, float], ...]) -> str | None:
    total: dict[int, float] = {}
    for token, amount in bias:
        total[token] = total.get(token, 0.0) + max(amount, 0.0)
        if total[token] > MAX_BIAS:
            return f"logit_bias of token {token} must be at most {MAX_BIAS:g}, not {total[token]:g}"
    return None
