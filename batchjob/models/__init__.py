"""Models as files: a hub id, a local directory or a `.gguf` file becomes a `ModelInfo`.

Only files are read here: no torch, no Transformers, and never code from a model repository.
"""

from batchjob.models.info import ModelInfo
from batchjob.models.loadable import check_loadable
from batchjob.models.resolve import resolve_model
from batchjob.models.sampling_defaults import ignored_generation_settings, sampling_defaults
from batchjob.models.tokenizer_files import special_tokens

__all__ = [
    "ModelInfo",
    "check_loadable",
    "ignored_generation_settings",
    "resolve_model",
    "sampling_defaults",
    "special_tokens",
]
