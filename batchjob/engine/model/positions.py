"""Gives a model the positions of a packed step's tokens.

Most take `position_ids`. Decoders in the manner of BART do not: they have a table of positions, a module whose forward
counts from the length of the cache unless it is given positions. Packed, such counting would be wrong, so the positions
of the step are put into its call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import nn

from batchjob.engine.model.attention_hook import current_step

# What a table of positions calls the length of the cache; the name has changed in Transformers.
_COUNTED_FROM = {"cache_length", "past_key_values_length"}


@cache
def taken_arguments(forward: Callable[..., Any]) -> frozenset[str] | None:
    """Names of the arguments that the forward of a class takes; None: any."""
    parameters = inspect.signature(forward).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    return frozenset(parameters)


def give_positions(module: nn.Module) -> None:
    """Makes every table of positions use those of the current step, if there is one and the model gives it none."""
    counts_itself = "position_ids" not in inspect.signature(type(module).forward).parameters

    def put(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        step = current_step()
        is_given = not counts_itself and kwargs.get("position_ids") is not None
        if step is not None and step.positions is not None and not is_given:
            kwargs = {**kwargs, "position_ids": step.positions}
        return args, kwargs

    for part in module.modules():
        taken = taken_arguments(type(part).forward)
        if taken is not None and "position_ids" in taken and taken & _COUNTED_FROM:
            part.register_forward_pre_hook(put, with_kwargs=True)
