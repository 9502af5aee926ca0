"""`FakeRunner`: a runner without a model or torch, for `--engine fake` and for tests of everything but the model.

Its answers are short, made of the words of `FakeTokenizer` (token ids 4 to 259), and end with its end token. They
depend on the request's stream and prompt alone, so that they are the same in any batch, order, shard or attempt.
"""

from __future__ import annotations

import os
import signal
import time
from array import array
from zlib import crc32

from batchjob.core.sequence import Sequence
from batchjob.core.step_plan import StepPlan
from batchjob.engine.config import Capacity, EngineConfig, StepOutput

VOCAB_SIZE = 65_536
EOS_TOKEN_ID = 2
_FIRST_WORD = 4  # words are token ids 4 to 259: one for each value of a byte
_MAX_WORDS = 6  # longest answer, in words
_LOOP = 64  # words after which an answer that must not end repeats itself
_KV_BYTES_PER_TOKEN = 1024  # what a token of this model would take, so that --kv-cache-memory has its effect
_WORD_MASK = (1 << 64) - 1


def fake_capacity(config: EngineConfig) -> Capacity:
    """Limits as given; otherwise generous ones, with room for a sequence of `max_model_len` at least."""
    block_size = config.block_size
    if config.kv_cache_bytes is None:
        num_blocks = max(16_384, -(-config.max_model_len // block_size))
    else:
        num_blocks = max(1, config.kv_cache_bytes // (_KV_BYTES_PER_TOKEN * block_size))
    num_blocks = config.halved(num_blocks, floor=-(-config.max_model_len // block_size))
    return Capacity(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=config.halved(config.max_num_seqs or 256),
        max_num_batched_tokens=config.halved(config.max_num_batched_tokens or 8192),
        vocab_size=VOCAB_SIZE,
        admission_interval=config.admission_interval or 1,
        async_scheduling=bool(config.async_scheduling),
        description=f"fake, no model, {num_blocks * block_size} tokens of KV",
    )


class FakeHandle:
    __slots__ = ("_output",)

    def __init__(self, output: StepOutput) -> None:
        self._output = output

    def result(self) -> StepOutput:
        return self._output


class FakeRunner:
    """Steps are counted from 1. The faults are for tests of what must survive them:

    step_seconds    every step takes this long
    crash_at_step   that step raises RuntimeError
    kill_at_step    that step kills the process with SIGKILL
    hang_at_step    that step never returns
    poison_token    a step with a row whose prompt holds this token kills the process with SIGKILL
    """

    def __init__(
        self,
        capacity: Capacity,
        *,
        eos_token_id: int = EOS_TOKEN_ID,
        step_seconds: float = 0.0,
        crash_at_step: int | None = None,
        kill_at_step: int | None = None,
        hang_at_step: int | None = None,
        poison_token: int | None = None,
    ) -> None:
        self._capacity = capacity
        self._eos_token_id = eos_token_id
        self._step_seconds = step_seconds
        self._crash_at_step = crash_at_step
        self._kill_at_step = kill_at_step
        self._hang_at_step = hang_at_step
        self._poison_token = poison_token
        self._num_steps = 0
        self._owners: list[Sequence | None] = [None] * capacity.max_num_seqs  # by slot
        self._answers: list[list[int]] = [[]] * capacity.max_num_seqs

    def capacity(self) -> Capacity:
        return self._capacity

    def execute(self, plan: StepPlan) -> FakeHandle:
        self._num_steps += 1
        self._misbehave(plan)
        owners, answers = self._owners, self._answers
        for seq, _, _ in plan.sampled:
            if owners[seq.slot] is not seq:
                owners[seq.slot] = seq
                answers[seq.slot] = self._answer(seq)
        steps = []
        for step in range(plan.num_steps):
            tokens = []
            for seq, _, stop in plan.sampled:
                answer = answers[seq.slot]
                tokens.append(answer[(stop + step - seq.num_prompt_tokens) % len(answer)])
            steps.append(tokens)
        return FakeHandle(StepOutput(steps))

    def close(self) -> None:
        self._owners, self._answers = [], []

    def _answer(self, seq: Sequence) -> list[int]:
        """The words of an answer and the end token, or words to be repeated where it must not end."""
        request = seq.request
        params = request.params
        state = _mix(request.stream ^ (crc32(array("q", request.token_ids)) << 16))
        num_words = max(1 + state % _MAX_WORDS, params.min_tokens)
        if params.ignore_eos:
            num_words = _LOOP
        words: list[int] = []
        while len(words) < num_words:
            state = _mix(state)
            words += [_FIRST_WORD + byte for byte in state.to_bytes(8, "little")]
        del words[num_words:]
        if not params.ignore_eos:
            words.append(self._eos_token_id)
        return words

    def _misbehave(self, plan: StepPlan) -> None:
        if self._step_seconds:
            time.sleep(self._step_seconds)
        if self._num_steps == self._crash_at_step:
            raise RuntimeError(f"told to crash at step {self._num_steps}")
        if self._num_steps == self._kill_at_step or (
            self._poison_token is not None
            and any(self._poison_token in slice_.seq.request.token_ids for slice_ in plan.slices)
        ):
            os.kill(os.getpid(), signal.SIGKILL)
        while self._num_steps == self._hang_at_step:
            time.sleep(1.0)


def _mix(state: int) -> int:
    """The SplitMix64 generator: the next 64 bits (Steele, Lea and Flood, 2014)."""
    state = (state + 0x9E3779B97F4A7C15) & _WORD_MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _WORD_MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _WORD_MASK
    return state ^ (state >> 31)
