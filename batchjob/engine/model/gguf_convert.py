"""Converts a GGUF file to a directory that the engine loads. Run as a program of its own, which may be killed:

    python -m batchjob.engine.model.gguf_convert SRC DST [--dtype float32]

Transformers reads the file and takes its quantisation back; DST gets safetensors, configuration, tokenizer,
generation_config and chat template. The last line on stderr says what went wrong.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from batchjob.engine.model.checkpoint import report_problem


def convert(source: Path, target: Path, dtype: torch.dtype) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where: dict[str, Any] = {"gguf_file": source.name, "local_files_only": True}
    model, report = AutoModelForCausalLM.from_pretrained(
        source.parent, dtype=dtype, ignore_mismatched_sizes=True, output_loading_info=True, **where
    )
    if problem := report_problem(report):
        raise ValueError(f"its weights are not those of a {type(model).__name__}: {problem}")
    tokenizer = AutoTokenizer.from_pretrained(source.parent, **where)
    # The weights are plain numbers now; what still calls them quantised would stop them from being saved and loaded.
    model.hf_quantizer = None
    model.is_quantized = False
    model.quantization_method = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m batchjob.engine.model.gguf_convert")
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    arguments = parser.parse_args()
    try:
        convert(arguments.source, arguments.target, getattr(torch, arguments.dtype))
    except Exception as error:  # whatever a damaged file brings about ends as one line for the caller
        print(f"{type(error).__name__}: {error}".splitlines()[0], file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
