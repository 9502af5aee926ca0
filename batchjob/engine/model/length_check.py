"""Positions and windows for the load check, so that it reaches past every length at which a model changes.

A model may scale its queries beyond some position, change its rotary factors at its original length, or end its table
of positions: so the check runs at positions around each such length too. What depends on the distance between two
tokens, a sliding window, is brought within reach instead: the window is made a few tokens long, in the model and in its
configuration, and the check is run once more. Neither costs more than a few dozen tokens per length.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from batchjob.engine.model.load_check import TEST_LENS

SMALL_WINDOW = 6  # tokens; below the lengths of the test sequences
_LENGTH_NAME = re.compile(r"max_position|original_max|window|chunk|floor|_len(gth)?$|n_ctx|n_positions")


def first_positions(config: Any, max_model_len: int) -> list[int]:
    """Positions at which the test sequences are to begin: 0, before each length that the configuration names, and at
    the end of what the job allows."""
    longest = max(TEST_LENS)
    ends = {length for length in _lengths(config.to_dict()) if longest < length < max_model_len}
    starts = {0, *(length - longest // 2 for length in ends if length + longest <= max_model_len)}
    if max_model_len > longest:
        starts.add(max_model_len - longest)
    return sorted(starts)


def _lengths(settings: Mapping[Any, Any]) -> Iterator[int]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _lengths(value)
        elif isinstance(name, str) and _LENGTH_NAME.search(name):
            for length in value if isinstance(value, list | tuple) else (value,):
                if type(length) in (int, float) and length > 0 and length == int(length):
                    yield int(length)


@contextmanager
def short_windows(module: nn.Module, windows: set[int]) -> Iterator[bool]:
    """Makes every sliding window of a model `SMALL_WINDOW` tokens long for a while; False if it has none to shorten.

    `windows` are those of its attention calls. What is shortened are the attributes of its parts, fused or not, and the
    entries of its configurations whose names say so and whose values are among `windows`, or any if there are none.
    """
    changed: list[tuple[Callable[[Any], None], Any]] = []
    values = {window for window in windows if window > SMALL_WINDOW}
    for owner in _owners(module):
        for name, value in list(vars(owner).items()):
            if "window" not in name or type(value) is not int or value <= SMALL_WINDOW:
                continue
            if values and value not in values:
                continue
            changed.append((_setter(owner, name), value))
    for put, _ in changed:
        put(SMALL_WINDOW)
    try:
        yield bool(changed)
    finally:
        for put, value in changed:
            put(value)


def _setter(owner: Any, name: str) -> Callable[[Any], None]:
    return lambda value: setattr(owner, name, value)


def _owners(module: nn.Module) -> Iterator[Any]:
    """The parts of a model, and the configurations that they hold."""
    seen: set[int] = set()
    for part in module.modules():
        yield part
        config = getattr(part, "config", None)
        for found in (config, *(vars(config).values() if config is not None else ())):
            if hasattr(found, "model_type") and id(found) not in seen:
                seen.add(id(found))
                yield found
