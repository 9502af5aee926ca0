"""`DeviceSampler`: what `Sampler` does, with settings, token counts and tokens that stay on the device.

So the next step can be started before the host knows the tokens of the last one, and several steps at once. A row
gets the same tokens from both: same order of work, same random numbers. What runs is either plain PyTorch or, with
`use_triton`, the kernels of `batchjob_kernels.sampling.triton`; nothing in `sample` or `ended` waits for the device or
has a shape that depends on what is in a tensor, so that both can be captured in a CUDA graph, one per `SampleMode`.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from batchjob.core.sequence import Sequence
from batchjob.engine.sampling import device_draw
from batchjob.engine.sampling.sampler import first_largest
from batchjob.engine.sampling.slot_params import SampleMode, SlotTables

__all__ = ["DeviceSampler", "SampleMode"]


def penalty_bytes(vocab_size: int, max_num_seqs: int) -> int:
    """Of the token counts that the first row with penalties brings: memory that the KV cache must leave."""
    return 4 * vocab_size * (max_num_seqs + 1)


class DeviceSampler:
    """Sampling settings by slot, and the sampler over them.

    A sequence is admitted each time it gets a slot; its settings are on the device after the next `upload`, which
    has to come before the first `sample` of that stay. Slot `max_num_seqs` is for the padding rows of a step.
    """

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        *,
        max_num_seqs: int,
        device: torch.device,
        use_triton: bool,
    ) -> None:
        self._tables = SlotTables(vocab_size, eos_token_ids, max_num_seqs, device)
        self._ops: ModuleType | None = None
        if use_triton:  # where Triton is missing, nothing else here needs it
            self._ops = import_module("batchjob_kernels.sampling.triton")

    def admit(self, seq: Sequence) -> None:
        """Stages the settings of a sequence that has just got `seq.slot`; of a penalised one its tokens, too."""
        self._tables.admit(seq)

    def release(self, slot: int) -> None:
        """Forgets what the slot asks for. Only for speed: `mode` stays as wide as the admitted slots need it."""
        self._tables.release(slot)

    @property
    def mode(self) -> SampleMode:
        """What the admitted slots need together; final once `upload` has run."""
        return self._tables.mode

    @torch.inference_mode()
    def upload(self) -> None:
        """Sends what was staged, without waiting. Not to be called while a graph is captured: tables may move."""
        self._tables.upload()

    @torch.inference_mode()
    def sample(self, logits: Tensor, mode: SampleMode, slots: Tensor, num_output_tokens: Tensor) -> Tensor:
        """The next token of each row; int64 [n], with -1 where a row's best logit is not a finite number.

        `logits` [n, vocab_size] is left unchanged, `slots` and `num_output_tokens` are integers [n] on the device,
        the latter before this draw. Rows with penalties have their token counted: a row that goes on after a draw
        that was thrown away has to be admitted again.
        """
        tables, penalised = self._tables, mode.penalised
        if mode.edited:
            logits = self._edit(logits, mode, slots, num_output_tokens)
        if self._ops is not None:
            tokens = self._ops.sample(
                logits, tables.settings, slots, num_output_tokens, random=mode.random, filtered=mode.filtered
            )
        elif mode.random:
            settings = tables.settings[slots]
            tokens = device_draw.draw(logits, settings, num_output_tokens, filtered=mode.filtered)
        else:
            tokens = first_largest(logits)
        if penalised:
            tables.count(tokens, slots)
        return tokens

    def draw(
        self, logits: Tensor, slots: Tensor, num_output_tokens: Tensor, *, needs_ended: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The tokens that `sample` returns for the admitted slots, and with `needs_ended` what `ended` says of them."""
        tokens = self.sample(logits, self.mode, slots, num_output_tokens)
        return tokens, self.ended(tokens, slots, num_output_tokens) if needs_ended else None

    def _edit(self, logits: Tensor, mode: SampleMode, slots: Tensor, num_output_tokens: Tensor) -> Tensor:
        """A float32 copy of the logits with the edits that the rows ask for."""
        tables = self._tables
        settings = tables.settings[slots]
        if not mode.penalised:
            work = logits.to(torch.float32, copy=True)
        elif self._ops is not None:
            work = self._ops.penalise(logits, tables.settings, tables.counts, slots)
        else:
            assert tables.counts is not None
            work = device_draw.penalise(logits, settings, tables.counts[slots])
        if mode.bias_width:
            device_draw.add_bias(work, tables.bias[slots])
        if mode.held:
            device_draw.hold_back(work, settings, tables.stops[slots], num_output_tokens)
        return work

    @torch.inference_mode()
    def ended(self, tokens: Tensor, slots: Tensor, num_output_tokens: Tensor) -> Tensor:
        """Whether the tokens [n] that `sample` has just drawn end their rows; bool [n].

        By an end token (unless `ignore_eos`) or stop token once `min_tokens` are out, by length, or as -1.
        `num_output_tokens` is what `sample` got. Stop strings are the host's concern.
        """
        tables = self._tables
        if self._ops is not None:
            return self._ops.ended(tokens, tables.settings, tables.stops, slots, num_output_tokens)
        return device_draw.ended(tokens, tables.settings[slots], tables.stops[slots], num_output_tokens)
