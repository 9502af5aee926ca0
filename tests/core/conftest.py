"""A model whose KV cache shows what the scheduler did with it, and shorthands to make requests and run them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from batchjob.core import BlockPool, Scheduler, Sequence, SequenceState, Slice, StepPlan
from batchjob.records import Request
from batchjob.sampling import SamplingParams

_params: dict[tuple[int | None, int], SamplingParams] = {}


def _make_request(row_index: int, token_ids: Iterable[int], max_tokens: int | None = 4, sample: int = 0, n: int = 1):
    params = _params.setdefault((max_tokens, n), SamplingParams(max_tokens=max_tokens, n=n))
    return Request(row_index, sample, list(token_ids), params, stream=row_index * 1000 + sample)


class PrefixModel:
    """Where a real cache holds the keys and values of a token, this one holds a number that stands for all tokens up
    to it: what they depend on. Each step checks that every block a sequence reads holds that sequence's own prefix.

    The next token is a function of stream and prefix, so a wrong read, a lost token or a wrong order shows. As a real
    runner does, it keeps what it has sampled: the host may not know it yet.
    """

    def __init__(self, block_size: int, vocab_size: int = 7) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.cells: dict[int, int] = {}  # block * block_size + offset -> prefix
        self.num_tokens = 0
        self._tokens: dict[Sequence, list[int]] = {}
        self._prefixes: dict[Sequence, list[int]] = {}

    def execute(self, plan: StepPlan) -> list[list[int]]:
        """Tokens by step; 0 for a sequence that was over before a step."""
        seqs = [slice_.seq for slice_ in plan.slices]
        assert len(set(seqs)) == len(seqs)
        slots = [seq.slot for seq in seqs]
        assert len(set(slots)) == len(slots)
        for seq, start, stop in plan.slices:
            tokens = self._tokens.setdefault(seq, list(seq.tokens))
            assert tokens[: len(seq.tokens)] == seq.tokens
            assert start < stop <= len(tokens) == len(seq.tokens) + seq.num_in_flight - self._num_new(plan, seq, start)
        steps = [self._step(plan, plan.slices, plan.sampled)]
        for number in range(1, plan.num_steps):
            assert plan.decode_only
            slices = [
                Slice(seq, start + number, stop + number)
                for seq, start, stop in plan.slices
                if stop + number < seq.max_len
            ]
            tokens = dict(zip((slice_.seq for slice_ in slices), self._step(plan, slices, slices), strict=True))
            steps.append([tokens.get(seq, 0) for seq in seqs])
        return steps

    @staticmethod
    def _num_new(plan: StepPlan, seq: Sequence, start: int) -> int:
        """Tokens that this plan samples for the sequence."""
        if plan.num_steps > 1:
            return min(plan.num_steps, seq.max_len - start - 1)
        return sum(slice_.seq is seq for slice_ in plan.sampled)

    def _step(self, plan: StepPlan, slices: list[Slice], sampled: list[Slice]) -> list[int]:
        written: set[int] = set()
        for seq, start, stop in slices:
            prefixes = self._prefixes.setdefault(seq, [])
            extend_prefixes(prefixes, self._tokens[seq])
            for position in range(start, stop):
                cell = self._cell(seq, position)
                assert cell not in written
                written.add(cell)
                self.cells[cell] = prefixes[position]
        for seq, _, stop in slices:
            for position in {*range(self.block_size - 1, stop, self.block_size), stop - 1}:
                assert self.cells[self._cell(seq, position)] == self._prefixes[seq][position]
        assert plan.num_tokens == len(written) or plan.num_steps > 1
        self.num_tokens += len(written)
        new = [self.sample(slice_.seq.request, self._prefixes[slice_.seq][slice_.stop - 1]) for slice_ in sampled]
        for slice_, token in zip(sampled, new, strict=True):
            self._tokens[slice_.seq].append(token)
        return new

    def sample(self, request: Request, prefix: int) -> int:
        return hash((request.stream, prefix)) % self.vocab_size

    def answer(self, request: Request, num_tokens: int, eos: int | None = None) -> list[int]:
        """What the model says to a request alone, without any cache."""
        tokens, prefixes = list(request.token_ids), []
        for _ in range(num_tokens):
            extend_prefixes(prefixes, tokens)
            tokens.append(self.sample(request, prefixes[-1]))
            if tokens[-1] == eos:
                break
        return tokens[len(request.token_ids) :]

    def _cell(self, seq: Sequence, position: int) -> int:
        return seq.blocks[position // self.block_size] * self.block_size + position % self.block_size


def extend_prefixes(prefixes: list[int], tokens: list[int]) -> None:
    for position in range(len(prefixes), len(tokens)):
        prefixes.append(hash((prefixes[-1] if prefixes else 0, tokens[position])))


class Runner:
    """A scheduler, its pool and a model, stepped together; sequences end at `max_len`, or at the token `eos`.
    `check()` after every call.

    With `ahead` each step is scheduled before the tokens of the one before it are known; `num_steps` as in a plan.
    """

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        *,
        checked: bool = True,
        ahead: bool = False,
        num_steps: int = 1,
        eos: int | None = None,
        **settings: Any,
    ) -> None:
        limits = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 10_000}
        self.pool = BlockPool(num_blocks, block_size)
        self.scheduler = Scheduler(self.pool, **{**limits, **settings})
        self.model = PrefixModel(block_size)
        self.outputs: dict[tuple[int, int], list[int]] = {}
        self.out_of_cache: list[Sequence] = []
        self.seen: dict[Sequence, None] = {}  # every sequence that ever ran
        self.num_steps = 0
        self.ahead, self.steps_per_plan, self.eos = ahead, num_steps, eos
        self.in_flight: tuple[StepPlan, list[list[int]]] | None = None
        self._check = self.scheduler.check if checked else lambda: None

    def add(self, *requests: Request) -> None:
        for request in requests:
            assert self.scheduler.add(request) is None
            self._check()

    def step(self) -> list[tuple[int, int, int]] | None:
        """One step, as (row, start, stop) of each slice; None when there was nothing to do."""
        plan = self.scheduler.schedule(self.steps_per_plan)
        self._check()
        self.out_of_cache += self.scheduler.out_of_cache
        if plan is None and self.in_flight is None:
            return None
        summary = []
        started = None
        if plan is not None:
            assert 0 < plan.num_tokens <= self.scheduler.max_num_batched_tokens
            self.num_steps += plan.num_steps
            self.seen.update(dict.fromkeys(slice_.seq for slice_ in plan.slices))
            summary = [(seq.request.row_index, start, stop) for seq, start, stop in plan.slices]
            started = plan, self.model.execute(plan)
        if self.ahead:
            started, self.in_flight = self.in_flight, started
        if started is not None:
            self._collect(*started)
        return summary

    def settle(self) -> None:
        """Takes in what is in flight."""
        if self.in_flight is not None:
            self._collect(*self.in_flight)
            self.in_flight = None

    def _collect(self, plan: StepPlan, steps: list[list[int]]) -> None:
        for tokens in steps:
            self.scheduler.commit(plan, tokens)
            self._check()
            for slice_, token in zip(plan.sampled, tokens, strict=True):
                seq = slice_.seq
                if seq.state is SequenceState.FINISHED or not (len(seq.tokens) == seq.max_len or token == self.eos):
                    continue
                self.scheduler.finish(seq)
                self._check()
                key = seq.request.row_index, seq.request.sample_index
                assert key not in self.outputs
                self.outputs[key] = seq.output_token_ids

    @property
    def running(self) -> list[Sequence]:
        return [seq for seq in self.seen if seq.state is SequenceState.RUNNING]

    def run_until_preempted(self) -> None:
        while not self.scheduler.num_preemptions:
            assert self.step() is not None, "all rows ended and none was preempted"

    def run(self) -> Runner:
        while self.step() is not None:
            pass
        assert self.scheduler.num_waiting == self.scheduler.num_running == 0
        assert self.pool.num_free == self.pool.num_blocks
        return self


@pytest.fixture(scope="session")
def make_request() -> Callable[..., Request]:
    """`make_request(row_index, token_ids, max_tokens=4, sample=0, n=1)`"""
    return _make_request


@pytest.fixture(scope="session")
def make_runner() -> type[Runner]:
    return Runner


@pytest.fixture(scope="session")
def make_model() -> type[PrefixModel]:
    return PrefixModel
