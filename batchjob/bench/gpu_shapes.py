"""The shapes of the models that `gpu_check` measures, as plain numbers, and models of them with random weights.

Speed depends on shapes, not on what the weights say, so nothing is downloaded. The numbers are those of the models'
published configurations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    kind: str  # "qwen3" | "llama"
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool  # the output matrix is the embedding
    rope: dict[str, Any]
    norm_eps: float
    max_position: int

    @property
    def linear_weights(self) -> int:
        """Weights of all linear layers but the output matrix: each token is multiplied with all of them."""
        attention = (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim * self.hidden_size
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def head_weights(self) -> int:
        """Weights of the output matrix: only tokens after which one is sampled are multiplied with them."""
        return self.hidden_size * self.vocab_size

    @property
    def kv_numbers(self) -> int:
        """Numbers that one token leaves in the cache, in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def tiny(self) -> Shape:
        """The same kind of model in a size that a CPU runs in no time; for rehearsals and tests."""
        small: dict[str, Any] = {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 16,
            "vocab_size": 512,
            "max_position": 4096,
        }
        return replace(self, **small)

    def config(self) -> Any:
        """As a Transformers configuration."""
        from transformers import LlamaConfig, Qwen3Config

        made: Any = {"qwen3": Qwen3Config, "llama": LlamaConfig}[self.kind](
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rms_norm_eps=self.norm_eps,
            rope_parameters=dict(self.rope),
            max_position_embeddings=self.max_position,
            tie_word_embeddings=self.tied,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        return made


_QWEN_ROPE = {"rope_type": "default", "rope_theta": 1_000_000.0}
_LLAMA_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SHAPES = {
    shape.name: shape
    for shape in (
        Shape("Qwen3-0.6B", "qwen3", 1024, 3072, 28, 16, 8, 128, 151_936, True, _QWEN_ROPE, 1e-6, 40_960),
        Shape("Qwen3-8B", "qwen3", 4096, 12_288, 36, 32, 8, 128, 151_936, False, _QWEN_ROPE, 1e-6, 40_960),
        Shape("Llama-3.1-8B", "llama", 4096, 14_336, 32, 32, 8, 128, 128_256, False, _LLAMA_ROPE, 1e-5, 131_072),
    )
}


def build(
    shape: Shape, *, device: torch.device, dtype: torch.dtype, attention: str | None = None, std: float = 0.02
) -> nn.Module:
    """A model of this shape, its matrices drawn on the device from a normal distribution, the same each time on one
    kind of device. `attention` is the name of Transformers' attention function; by default the engine's own."""
    from transformers import AutoModelForCausalLM

    from batchjob.engine.model.attention_hook import ATTENTION_NAME, register

    register()
    with torch.device(device):
        module: nn.Module = AutoModelForCausalLM.from_config(
            shape.config(), dtype=dtype, attn_implementation=attention or ATTENTION_NAME
        )
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in module.parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, std)
    return module.requires_grad_(False).eval()
