"""Asks whether a model's weights and configuration make a model, without loading the weights and without torch here."""

from __future__ import annotations

import os
import subprocess
import sys

from batchjob.errors import UnsupportedModelError
from batchjob.models.info import ModelInfo

_SECONDS = 600  # to import Transformers from a slow file system


def check_loadable(model: ModelInfo) -> None:
    """Builds the model in a process of its own from the headers of its weight files: a few seconds for any size.

    Raises UnsupportedModelError where a run would refuse the model for its weights or its configuration.
    """
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "batchjob.engine.model.checkpoint", model.path]
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        message = f"{model.name} was not checked within {_SECONDS} s; is its file system slow?"
        raise UnsupportedModelError(message) from None
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"the check ended with status {done.returncode}"]
        raise UnsupportedModelError(lines[-1])
