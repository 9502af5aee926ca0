"""Builds a Transformers model and fills it with a checkpoint's tensors, all and no others, or says what is wrong.

Transformers fills what a checkpoint lacks with random numbers and only logs it. It also decides by itself which files
of a directory it reads. Here it is handed the tensors that `models.weights` names, the same that a job's fingerprint
covers, and its report is read: a tensor that is missing, left over or of another shape is an error.

`check_checkpoint` comes to the same report from the headers of the weight files and a model on the meta device, which
has shapes and no data: seconds for a model of any size. Run as a program it is what `batchjob validate` asks:

    python -m batchjob.engine.model.checkpoint DIRECTORY
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from batchjob.engine.model.attention_hook import ATTENTION_NAME, register
from batchjob.errors import BatchJobError, EngineError, UnsupportedModelError
from batchjob.models.weights import TensorPlace, locate_tensors

# Buffers that older versions of Transformers saved with a model. Its code computes them, and they hold nothing learned.
_OLD_BUFFERS = re.compile(
    r"(^|\.)(attn|attention|self_attn)\.(masked_)?bias$|rotary_(pos_)?emb\.(inv_freq|cos_cached|sin_cached)$"
    r"|(^|\.)position_ids$|^rope_freqs\.weight$"
)
# What stands beside the language model in a checkpoint that also takes pictures or sound.
_OTHER_PARTS = re.compile(r"(model\.)?(vision|visual|audio|speech|image|multi_modal|mm_|vq)\w*\.")
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NUM_SHOWN = 3


def load_config(path: Path) -> Any:
    """The model's configuration. Raises UnsupportedModelError."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a config of another version or a damaged one may fail in any way
        message = f"{path} has no configuration that Transformers can use: {described(error)}"
        raise UnsupportedModelError(message) from None


def load_module(
    path: Path, config: Any, dtype: torch.dtype, device: torch.device, tensor_parallel: int = 1
) -> nn.Module:
    """The model of a checkpoint on `device` in `dtype`, with our attention function.

    With `tensor_parallel` it is this process's share. Raises UnsupportedModelError or EngineError: where the headers
    of the files tell, before a weight is read.
    """
    check_checkpoint(path, copy.deepcopy(config))
    placement: dict[str, Any] = {"device_map": {"": str(device)}}
    if tensor_parallel > 1:
        from transformers.distributed import DistributedConfig

        placement = {"distributed_config": DistributedConfig(tp_size=tensor_parallel, tp_plan="auto")}
    kind, config, is_part = _model_class(copy.deepcopy(config))
    places = locate_tensors(path, name=str(path))
    with ExitStack() as stack:
        try:
            files = {place.file: None for place in places.values()}
            opened = {file: stack.enter_context(safe_open(path / file, framework="pt")) for file in files}
            tensors = {name: opened[place.file].get_slice(name) for name, place in places.items()}
        except (OSError, SafetensorError) as error:
            raise EngineError(f"{path} does not load: {described(error)}") from None
        module = _filled(path, kind, config, places, tensors, dtype, placement, is_part=is_part)
    if device.type == "cpu":
        _own_memory(module)
    return module


def check_checkpoint(path: Path, config: Any = None) -> None:
    """Raises what `load_module` would raise, without reading a weight: UnsupportedModelError or EngineError."""
    kind, config, is_part = _model_class(load_config(path) if config is None else config)
    places = locate_tensors(path, name=str(path))
    tensors = {
        name: torch.empty(place.shape, dtype=_FLOATS.get(place.dtype, torch.int64), device="meta")
        for name, place in places.items()
    }
    _filled(path, kind, config, places, tensors, torch.float32, {"device_map": {"": "meta"}}, is_part=is_part)


def _own_memory(module: nn.Module) -> None:
    """On a CPU a tensor of the checkpoint's own dtype is a view of the file; a write into the file would change the
    model under the rows that run. One tensor at a time, so little more memory is needed than for the model."""
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = tensor.data.clone()


def _model_class(config: Any) -> tuple[Any, Any, bool]:
    """The causal language model of Transformers that has such a configuration, and the part of it that is the model's:
    the text part (True) of a checkpoint that also takes pictures or sound, else all of it."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    except Exception as error:  # the family's code is imported here
        raise UnsupportedModelError(f"{config.model_type} models do not run here: {described(error)}") from None
    if kind is None:
        raise UnsupportedModelError(f"{config.model_type} models are no causal language models: give another --model")
    kind = kind[0] if isinstance(kind, tuple | list) else kind
    text_config = (getattr(config, "sub_configs", None) or {}).get("text_config")
    if text_config is not None and kind.config_class is text_config:
        return kind, config.get_text_config(), True
    return kind, config, False


def _filled(
    path: Path,
    kind: Any,
    config: Any,
    places: Mapping[str, TensorPlace],
    tensors: dict[str, Any],
    dtype: torch.dtype,
    placement: dict[str, Any],
    *,
    is_part: bool,
) -> nn.Module:
    register()
    try:
        with _quiet():
            module, report = kind.from_pretrained(
                None,
                config=config,
                state_dict=tensors,
                dtype=dtype,
                **placement,
                attn_implementation=ATTENTION_NAME,
                ignore_mismatched_sizes=True,  # they are in the report
                output_loading_info=True,
            )
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except (OSError, SafetensorError) as error:
        raise EngineError(f"{path} does not load: {described(error)}") from None
    except RuntimeError as error:
        raise EngineError(f"{path} does not load as {kind.__name__}: {described(error)}") from None
    except Exception as error:  # a family that takes no attention function, or a config that its code cannot use
        takes_none = isinstance(error, KeyError) and ATTENTION_NAME in error.args
        reason = "their attention cannot be replaced by batchjob's" if takes_none else described(error)
        raise UnsupportedModelError(f"{config.model_type} models do not run here: {reason}") from None
    problem = report_problem(report, is_part=is_part) or _number_problem(module, places)
    if problem:
        made_for = [name for name in config.architectures or () if name != kind.__name__]
        hint = f" The checkpoint says it is for {', '.join(made_for)}." if made_for else ""
        raise UnsupportedModelError(
            f"the weights in {path} are not those of a {kind.__name__}: {problem}.{hint} Transformers would go on with "
            "random numbers or without them. Use a complete checkpoint of a causal language model"
        )
    return module  # type: ignore[no-any-return]


def report_problem(report: Mapping[str, Any], *, is_part: bool = False) -> str | None:
    """The part of Transformers' report on a load that means that the model is not the checkpoint's, or None.

    Names that the model's class declares harmless are not in the report; those of old buffers are passed over,
    and with `is_part` those of what turns pictures and sound into embeddings.
    """
    missing = sorted(report["missing_keys"])
    unexpected = sorted(
        name
        for name in report["unexpected_keys"]
        if not _OLD_BUFFERS.search(name) and not (is_part and _OTHER_PARTS.match(name))
    )
    mismatched = [
        f"{name} {list(there)} instead of {list(wanted)}" for name, there, wanted in sorted(report["mismatched_keys"])
    ]
    errors = [*report.get("error_msgs", ()), *map(str, dict(report.get("conversion_errors") or {}).values())]
    parts = [
        _counted(missing, "missing"),
        _counted(mismatched, "of another shape"),
        _counted(unexpected, "left over"),
        _counted([error.strip().splitlines()[-1] for error in errors if error.strip()], "not converted"),
    ]
    return "; ".join(filter(None, parts)) or None


def _counted(names: list[str], what: str) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _NUM_SHOWN} more" if len(names) > _NUM_SHOWN else ""
    number = "1 tensor is" if len(names) == 1 else f"{len(names)} tensors are"
    return f"{number} {what} ({', '.join(names[:_NUM_SHOWN])}{more})"


def _number_problem(module: nn.Module, places: Mapping[str, TensorPlace]) -> str | None:
    """Whole numbers and 8-bit floats where the model computes with floats: quantised weights without their scales."""
    # By their last part: what stands before it may be another in the checkpoint.
    buffers = {name.rpartition(".")[2] for name, buffer in module.named_buffers() if not buffer.is_floating_point()}
    wrong = [
        f"{name} {place.dtype}"
        for name, place in sorted(places.items())
        if place.dtype not in _FLOATS and name.rpartition(".")[2] not in buffers and not _OLD_BUFFERS.search(name)
    ]
    return _counted(wrong, "not in floating-point numbers, as quantised weights are") or None


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Transformers' progress bars, and without its log of what the report says."""
    from transformers.utils import logging as transformers_logging

    was_enabled, verbosity = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if was_enabled:
            transformers_logging.enable_progress_bar()


def described(error: BaseException) -> str:
    """The first line of an error's message, and its kind where that is part of what it says."""
    text = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, OSError | ValueError | RuntimeError | SafetensorError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def main() -> int:
    """Checks one directory; the last line on standard error says what is wrong. Exit code 70 then."""
    try:
        check_checkpoint(Path(sys.argv[1]))
    except BatchJobError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
