"""From a row to token ids: which columns, which form, the chat template, limits on length, per-row settings."""

from batchjob.prompts.builder import PromptBuilder, PromptConfig
from batchjob.prompts.source import PromptSource, prompt_columns, resolve_prompt

__all__ = ["PromptBuilder", "PromptConfig", "PromptSource", "prompt_columns", "resolve_prompt"]
