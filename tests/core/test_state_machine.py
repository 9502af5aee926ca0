"""Any order of operations leaves the invariants whole and every answer right."""

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from batchjob.core import SequenceState


class SchedulerMachine(RuleBasedStateMachine):
    """Few blocks, few slots, few token values: shared prefixes, preemptions, rows that outgrow the cache."""

    def __init__(self, make_runner, make_request) -> None:
        super().__init__()
        self.make_runner = make_runner
        self.make_request = make_request
        self.requests = {}
        self.gone = set()  # taken out before their end

    @initialize(
        num_blocks=st.integers(1, 14),
        block_size=st.integers(1, 4),
        max_num_seqs=st.integers(1, 5),
        max_num_batched_tokens=st.integers(1, 12),
        prefix_caching=st.booleans(),
        ahead=st.booleans(),
        num_steps=st.integers(1, 5),
        eos=st.sampled_from([None, 0]),
        admission_interval=st.sampled_from([1, 3]),
    )
    def start(self, num_blocks, block_size, **settings):
        self.runner = self.make_runner(num_blocks, block_size, max_model_len=40, **settings)
        self.scheduler = self.runner.scheduler

    @rule(
        token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=20),
        max_tokens=st.integers(1, 20),
        n=st.integers(1, 3),
    )
    def add_row(self, token_ids, max_tokens, n):
        row_index = len(self.requests)
        for sample in range(n):
            request = self.make_request(row_index, token_ids, max_tokens, sample=sample, n=n)
            error = self.scheduler.add(request)
            fits = -(-len(token_ids) // self.runner.pool.block_size) <= self.runner.pool.num_blocks
            assert (error is None) == fits
            if error is None:
                self.requests[row_index, sample] = request
        self.scheduler.check()

    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            if self.runner.step() is None:
                assert self.scheduler.num_waiting == self.scheduler.num_running == 0

    @precondition(lambda self: self.runner.running)
    @rule(data=st.data())
    def cancel(self, data):
        seq = data.draw(st.sampled_from(self.runner.running))
        self.scheduler.finish(seq)
        self.scheduler.check()
        self.gone.add((seq.request.row_index, seq.request.sample_index))

    @rule()
    def drop_waiting(self):
        dropped = self.scheduler.drop_waiting()
        assert self.scheduler.num_waiting == 0
        assert all(seq.state is SequenceState.FINISHED for seq in dropped)
        self.scheduler.check()
        self.gone |= {(seq.request.row_index, seq.request.sample_index) for seq in dropped}

    @rule()
    def stop_and_go_on(self):
        """Everything is taken out, and comes back with the tokens that it has made."""
        dropped = [*self.scheduler.drop_running(), *self.scheduler.drop_waiting()]
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        self.scheduler.check()
        capacity = self.runner.pool.num_blocks * self.runner.pool.block_size
        for seq in dropped:
            error = self.scheduler.add(replace(seq.request, output_token_ids=tuple(seq.output_token_ids)))
            assert (error is None) == (len(seq.tokens) <= capacity)
            if error is not None:
                self.gone.add((seq.request.row_index, seq.request.sample_index))
        self.scheduler.check()

    def teardown(self):
        if not hasattr(self, "runner"):
            return
        self.runner.run()
        out_of_cache = {(seq.request.row_index, seq.request.sample_index): seq for seq in self.runner.out_of_cache}
        ended = [*self.runner.outputs, *out_of_cache, *self.gone]
        assert sorted(ended) == sorted(self.requests)  # each exactly once
        for key, tokens in self.runner.outputs.items():
            request = self.requests[key]
            num_tokens = min(request.params.max_tokens, 40 - len(request.token_ids))
            assert tokens == self.runner.model.answer(request, num_tokens, self.runner.eos)
        for seq in out_of_cache.values():
            assert len(seq.tokens) == self.runner.pool.num_blocks * self.runner.pool.block_size + 1


def test_any_order_of_operations(make_runner, make_request):
    run_state_machine_as_test(
        lambda: SchedulerMachine(make_runner, make_request), settings=settings(max_examples=150, stateful_step_count=40)
    )
