"""The engine loop with scripted and fake runners: how rows end, what a failure costs, what the host does per token."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from batchjob.core import StepPlan
from batchjob.engine import Capacity, Engine, EngineConfig, FakeRunner, StepOutput
from batchjob.engine.fake import FakeHandle
from batchjob.errors import EngineError, StorageError
from batchjob.records import Completion, Request
from batchjob.sampling import SamplingParams

EOS = 0


class Letters:
    """One character per token, its code point; token 0 is special."""

    special_tokens = ()

    def __init__(self) -> None:
        self.num_calls = 0

    def decode(self, ids: list[int]) -> str:
        self.num_calls += 1
        return "".join(chr(token) for token in ids if token != EOS)


class ScriptedRunner:
    """Answers row i with `answers[i]`, and again from the start where that is over. A callable may do more."""

    def __init__(
        self,
        answers: Sequence[Sequence[int]],
        before: Callable[[StepPlan], Any] = lambda plan: None,
        *,
        async_scheduling: bool = False,
        **limits: int,
    ):
        self.answers = answers
        self.before = before
        self.async_scheduling = async_scheduling
        self.limits = {"num_blocks": 64, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 32} | limits
        self.closed = False
        self.plans: list[StepPlan] = []

    def capacity(self) -> Capacity:
        return Capacity(
            **self.limits, vocab_size=0x110000, description="scripted", async_scheduling=self.async_scheduling
        )

    def execute(self, plan: StepPlan) -> FakeHandle:
        self.before(plan)
        self.plans.append(plan)
        steps = []
        for step in range(plan.num_steps):
            answers = [
                (self.answers[seq.request.row_index], stop - seq.num_prompt_tokens) for seq, _, stop in plan.sampled
            ]
            steps.append([answer[(position + step) % len(answer)] for answer, position in answers])
        return FakeHandle(StepOutput(steps))

    def close(self) -> None:
        self.closed = True


def codes(text: str) -> list[int]:
    """Letters as tokens; `$` is the end token."""
    return [EOS if letter == "$" else ord(letter) for letter in text]


def run(engine: Engine, requests: Sequence[Request]) -> dict[int, Completion]:
    done = [completion for request in requests if (completion := engine.add(request)) is not None]
    while engine.has_unfinished():
        done += engine.step()
    by_row = {completion.row_index: completion for completion in done}
    assert len(by_row) == len(done) == len(requests)
    return by_row


def answer(text: str, *, max_model_len: int = 100, prompt: str = "?", **params: Any) -> Completion:
    """What one row whose model says `text`, again and again, ends as."""
    engine = Engine(
        ScriptedRunner([codes(text)]), Letters(), EngineConfig(max_model_len=max_model_len, eos_token_ids=(EOS,))
    )
    return run(engine, [Request(0, 0, codes(prompt), SamplingParams(**params), 1)])[0]


def outcome(completion: Completion) -> tuple[str | None, str | None, int]:
    return completion.text, completion.finish_reason, len(completion.token_ids)


class TestEnds:
    def test_end_token_stays_in_the_ids_and_out_of_the_text(self) -> None:
        completion = answer("yes$no")
        assert outcome(completion) == ("yes", "stop", 4)
        assert completion.token_ids == codes("yes$")
        assert completion.num_prompt_tokens == 1

    def test_end_token_at_once_is_an_empty_answer(self) -> None:
        assert outcome(answer("$")) == ("", "stop", 1)

    @pytest.mark.parametrize("max_tokens", [1, 2, 7])
    def test_max_tokens_is_exact(self, max_tokens: int) -> None:
        assert outcome(answer("abcdefghijk", max_tokens=max_tokens)) == (
            "abcdefghijk"[:max_tokens],
            "length",
            max_tokens,
        )

    def test_end_token_as_the_last_one_allowed_is_a_stop(self) -> None:
        assert outcome(answer("ab$", max_tokens=3)) == ("ab", "stop", 3)

    def test_every_end_token_ends_a_row(self) -> None:
        config = EngineConfig(max_model_len=100, eos_token_ids=(EOS, ord("#"), ord("%")))
        engine = Engine(ScriptedRunner([codes("a$"), codes("ab#"), codes("abc%")]), Letters(), config)
        done = run(engine, [Request(row, 0, [65], SamplingParams(), row) for row in range(3)])
        assert [outcome(done[row]) for row in range(3)] == [("a", "stop", 2), ("ab", "stop", 3), ("abc", "stop", 4)]

    def test_ignore_eos_goes_on_past_the_end_token(self) -> None:
        assert outcome(answer("hi$", ignore_eos=True, max_tokens=8)) == ("hihihi", "length", 8)

    def test_stop_token_ids_end_a_row_also_with_ignore_eos(self) -> None:
        stop_ids = (ord(";"),)
        assert outcome(answer("a$b;c", stop_token_ids=stop_ids, ignore_eos=True)) == ("ab", "stop", 4)
        assert outcome(answer("ab;c", stop_token_ids=stop_ids)) == ("ab", "stop", 3)

    def test_a_stop_token_of_one_row_means_nothing_to_another(self) -> None:
        engine = Engine(
            ScriptedRunner([codes("a;b$")] * 2), Letters(), EngineConfig(max_model_len=9, eos_token_ids=(EOS,))
        )
        stopping = SamplingParams(stop_token_ids=(ord(";"),))
        done = run(engine, [Request(0, 0, [65], stopping, 0), Request(1, 0, [65], SamplingParams(), 0)])
        assert (done[0].text, done[1].text) == ("a", "a;b")


class HalfCharacters(Letters):
    """One byte per token."""

    def decode(self, ids: list[int]) -> str:
        return bytes(token for token in ids if token).decode(errors="replace")


class TestStopStrings:
    def test_cut_from_the_text_but_not_from_the_ids(self) -> None:
        completion = answer("one\n\nQ: two", stop=("\n\nQ:",))
        assert outcome(completion) == ("one", "stop", 7)

    def test_include_stop_keeps_it(self) -> None:
        assert outcome(answer("x;y", stop=(";",), include_stop=True)) == ("x;", "stop", 2)

    def test_an_unfinished_one_is_given_back_at_the_end(self) -> None:
        assert outcome(answer("no EN$", stop=("END",))) == ("no EN", "stop", 6)
        assert outcome(answer("no EN", stop=("END",), max_tokens=5)) == ("no EN", "length", 5)

    def test_one_that_is_complete_at_max_tokens_is_a_stop(self) -> None:
        assert outcome(answer("go END", stop=("END",), max_tokens=6)) == ("go ", "stop", 6)

    def test_the_prompt_takes_no_part(self) -> None:
        assert outcome(answer("D. On$", prompt="the EN", stop=("END",))) == ("D. On", "stop", 6)

    def test_one_row_with_a_stop_string_does_not_end_its_neighbours(self) -> None:
        engine = Engine(
            ScriptedRunner([codes("a;b$")] * 3), Letters(), EngineConfig(max_model_len=9, eos_token_ids=(EOS,))
        )
        params = [SamplingParams(), SamplingParams(stop=(";",)), SamplingParams(stop=("b",))]
        done = run(engine, [Request(row, 0, [65], params[row], 0) for row in range(3)])
        assert [done[row].text for row in range(3)] == ["a;b", "a", "a;"]

    def test_the_end_token_takes_no_part(self) -> None:
        assert outcome(answer("ab;", stop_token_ids=(ord(";"),), stop=("b;",))) == ("ab", "stop", 3)

    def test_held_back_text_that_completes_one_at_the_end_counts(self) -> None:
        runner = ScriptedRunner([[65, 0xE3]])
        engine = Engine(runner, HalfCharacters(), EngineConfig(max_model_len=50, eos_token_ids=(EOS,)))
        done = run(engine, [Request(0, 0, [65], SamplingParams(stop=("\ufffd",), max_tokens=2), 0)])
        assert outcome(done[0]) == ("A", "stop", 2)


class TestMinTokens:
    def test_stop_string_complete_before_does_not_cut_and_the_next_one_does(self) -> None:
        assert outcome(answer("a\nbc\nd\n", stop=("\n",), min_tokens=4)) == ("a\nbc", "stop", 5)

    def test_stop_string_complete_at_min_tokens_counts(self) -> None:
        assert outcome(answer("abc;d", stop=(";",), min_tokens=4)) == ("abc", "stop", 4)

    def test_stop_string_that_begins_before_and_is_complete_after_counts(self) -> None:
        assert outcome(answer("abEND", stop=("END",), min_tokens=4)) == ("ab", "stop", 5)

    def test_end_and_stop_tokens_before_do_not_end_the_row(self) -> None:
        # A real sampler holds them back; the engine does not rely on it.
        assert outcome(answer("a$b$c", min_tokens=3)) == ("ab", "stop", 4)
        assert outcome(answer("a;b;c", min_tokens=3, stop_token_ids=(ord(";"),))) == ("a;b", "stop", 4)

    def test_equal_to_max_tokens(self) -> None:
        assert outcome(answer("abcdefgh", min_tokens=6, max_tokens=6)) == ("abcdef", "length", 6)

    def test_text_held_back_until_an_end_below_min_tokens_does_not_cut(self) -> None:
        engine = Engine(ScriptedRunner([[65, 0xE3]]), HalfCharacters(), EngineConfig(max_model_len=3))
        done = run(engine, [Request(0, 0, [65], SamplingParams(stop=("\ufffd",), min_tokens=9), 0)])
        assert outcome(done[0]) == ("A\ufffd", "length", 2)

    def test_the_model_limit_ends_a_row_below_min_tokens(self) -> None:
        assert outcome(answer("ab;cd;", max_model_len=4, min_tokens=9, stop=(";",))) == ("ab;", "length", 3)


def fake_engine(max_model_len: int, **limits: int) -> Engine:
    limits = {"num_blocks": 64, "block_size": 16, "max_num_seqs": 8, "max_num_batched_tokens": 64} | limits
    runner = FakeRunner(Capacity(**limits, vocab_size=64, description=""), eos_token_id=EOS)

    class Anything(Letters):
        def decode(self, ids: list[int]) -> str:
            return " ".join(map(str, ids))

    return Engine(runner, Anything(), EngineConfig(max_model_len=max_model_len, eos_token_ids=(EOS,)))


def requests_of(lengths: Sequence[int], max_tokens: int | Sequence[int]) -> list[Request]:
    limits = [max_tokens] * len(lengths) if isinstance(max_tokens, int) else max_tokens
    return [
        Request(
            row,
            0,
            [5 + (7 * position + row) % 40 for position in range(length)],
            SamplingParams(max_tokens=limit, ignore_eos=True),
            row,
        )
        for row, (length, limit) in enumerate(zip(lengths, limits, strict=True))
    ]


class TestLengths:
    @pytest.mark.parametrize("max_num_seqs", [1, 2, 8])
    @pytest.mark.parametrize("budget", [3, 64])
    @pytest.mark.parametrize("reverse", [False, True])
    def test_each_row_is_held_to_the_limit_of_the_model(self, max_num_seqs: int, budget: int, reverse: bool) -> None:
        lengths = [6, 20, 21, 23, 24, 25, 30]  # of 24 at most
        expected = {20: 4, 21: 3, 23: 1, 6: 4}
        budget = max(budget, max_num_seqs)
        engine = fake_engine(24, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
        requests = requests_of(lengths, 4)
        done = run(engine, requests[::-1] if reverse else requests)
        for row, length in enumerate(lengths):
            completion = done[row]
            if length in expected:
                assert (len(completion.token_ids), completion.finish_reason) == (expected[length], "length")
            else:
                assert completion.error is not None
                assert completion.error.type == "prompt_too_long"
                assert str(length) in completion.error.message
                assert "24" in completion.error.message
                assert completion.text is None

    @pytest.mark.parametrize("order", [1, -1])
    def test_rows_larger_than_the_cache_fail_alone(self, order: int) -> None:
        # 12 blocks of 16: 192 tokens. A sequence of L tokens needs KV for L - 1 of them.
        lengths, limits = [40, 230, 30, 150, 185, 192, 193, 8], [8, 8, 8, 90, 8, 1, 1, 8]
        requests = requests_of(lengths, limits)
        engine = fake_engine(512, num_blocks=12)
        done = run(engine, requests[::order])
        errors = {row: done[row].error.type for row in done if done[row].error}  # type: ignore[union-attr]
        assert errors == {1: "kv_cache_too_small", 3: "kv_cache_too_small", 6: "kv_cache_too_small"}
        assert [len(done[row].token_ids) for row in (0, 2, 4, 5, 7)] == [8, 8, 8, 1, 8]
        assert len(done[3].token_ids) == 193 - 150  # generated before it was ended
        for row in errors:
            message = done[row].error.message  # type: ignore[union-attr]
            assert "13 KV blocks" in message or "15 KV blocks" in message
            assert "12" in message

    def test_results_do_not_depend_on_the_size_of_the_cache(self) -> None:
        requests = requests_of([30, 50, 20, 60, 45, 10], 60)
        roomy = run(fake_engine(200), requests)
        tight_engine = fake_engine(200, num_blocks=9)
        tight = run(tight_engine, requests)
        assert tight_engine.stats.num_preemptions > 0
        assert tight == roomy


class TestFailures:
    def test_logits_that_are_no_numbers_fail_their_row_only(self) -> None:
        runner = ScriptedRunner([codes("ab$"), [ord("x"), -1], codes("cd$")])
        engine = Engine(runner, Letters(), EngineConfig(max_model_len=50, eos_token_ids=(EOS,)))
        done = run(engine, [Request(row, 0, [65], SamplingParams(), row) for row in range(3)])
        assert (done[0].text, done[2].text) == ("ab", "cd")
        assert done[1].error is not None
        assert done[1].error.type == "engine_error"
        assert done[1].token_ids == [ord("x")]

    @pytest.mark.parametrize(
        ("ids", "params", "kind"),
        [
            ([5, 64], {}, "invalid_prompt"),
            ([5, -1], {}, "invalid_prompt"),
            ([], {}, "invalid_prompt"),
            ([5], {"stop_token_ids": (3, 64)}, "invalid_params"),
            ([5], {"logit_bias": ((64, 1.0),)}, "invalid_params"),
        ],
    )
    def test_ids_that_the_model_does_not_have_fail_the_row_and_not_the_step(
        self, ids: list[int], params: dict[str, Any], kind: str
    ) -> None:
        engine = fake_engine(64)
        completion = engine.add(Request(3, 1, ids, SamplingParams(**params), 0))
        assert completion is not None
        assert completion.error is not None
        assert (completion.row_index, completion.sample_index, completion.error.type) == (3, 1, kind)
        assert not engine.has_unfinished()

    def test_a_failing_runner_is_reported_with_its_step_and_rows(self) -> None:
        def fail(plan: StepPlan) -> None:
            raise ValueError("the device is gone")

        engine = Engine(ScriptedRunner([codes("a")] * 20, fail), Letters(), EngineConfig(max_model_len=50))
        for row in range(20):
            engine.add(Request(row, 0, [65, 66], SamplingParams(), row))
        with pytest.raises(EngineError, match=r"step 1 failed with ValueError: the device is gone .*8 seq.*16 tokens"):
            engine.step()
        assert engine.num_running + engine.num_waiting == 20

    def test_errors_of_ours_pass_through(self) -> None:
        def fail(plan: StepPlan) -> None:
            raise StorageError("disk full")

        engine = Engine(ScriptedRunner([codes("a")], fail), Letters(), EngineConfig(max_model_len=50))
        engine.add(Request(0, 0, [65], SamplingParams(), 0))
        with pytest.raises(StorageError, match="disk full"):
            engine.step()

    @pytest.mark.parametrize("async_scheduling", [False, True])
    def test_after_a_failed_step_rows_come_back_with_what_they_have(self, async_scheduling: bool) -> None:
        def third(plan: StepPlan) -> None:
            if len(runner.plans) == 3:
                raise RuntimeError("once")

        runner = ScriptedRunner([codes("abc$")], third, async_scheduling=async_scheduling)
        engine = Engine(runner, Letters(), EngineConfig(max_model_len=50, eos_token_ids=(EOS,)))
        engine.add(Request(0, 0, [65], SamplingParams(), 0))
        with pytest.raises(EngineError, match="once"):
            run(engine, [])
        [request] = engine.drop_running()
        assert request.output_token_ids == tuple(codes("abc"))[: 2 if async_scheduling else 3]


def test_nothing_to_do_is_an_empty_list() -> None:
    assert fake_engine(64).step() == []


def test_drop_waiting_gives_back_the_queue_and_lets_the_rest_finish() -> None:
    engine = fake_engine(64, max_num_seqs=2)
    for request in requests_of([5] * 6, 4):
        engine.add(request)
    engine.step()
    assert (engine.num_running, engine.num_waiting) == (2, 4)
    assert [request.row_index for request in engine.drop_waiting()] == [2, 3, 4, 5]
    done = []
    while engine.has_unfinished():
        done += engine.step()
    assert sorted(completion.row_index for completion in done) == [0, 1]


def test_rows_enter_and_leave_between_steps() -> None:
    runner = ScriptedRunner([codes("a$"), codes("abcdefgh$"), codes("ab$")], max_num_seqs=2)
    engine = Engine(runner, Letters(), EngineConfig(max_model_len=50, eos_token_ids=(EOS,)))
    done = run(engine, [Request(row, 0, [65], SamplingParams(), row) for row in range(3)])
    assert [done[row].text for row in range(3)] == ["a", "abcdefgh", "ab"]
    # Row 2 takes the place of row 0 on the step after that one's end: 9 steps for the long row, no more.
    assert len(runner.plans) == 9
    assert [len(plan.slices) for plan in runner.plans] == [2] * 5 + [1] * 4


def test_stop_strings_survive_preemption() -> None:
    text = "abcdefghijklmnopqrstuvwxyz;z"
    runner = ScriptedRunner([codes(text)] * 4, num_blocks=12, block_size=4, max_num_seqs=4)
    engine = Engine(runner, Letters(), EngineConfig(max_model_len=100))
    done = run(engine, [Request(row, 0, [65 + row], SamplingParams(stop=("z;",)), row) for row in range(4)])
    assert engine.stats.num_preemptions > 0
    assert {completion.text for completion in done.values()} == {text[:-3]}


def test_no_way_to_end_leaves_anything_behind() -> None:
    runner = ScriptedRunner([codes("abcdefghijkl")] * 6 + [[65, -1]], num_blocks=3, block_size=4, max_num_seqs=1)
    engine = Engine(runner, Letters(), EngineConfig(max_model_len=100, eos_token_ids=(ord("d"),)))
    settings = [{"stop": ("b",)}, {"max_tokens": 2}, {}, {"ignore_eos": True}, {"ignore_eos": True}, {}, {}]
    params = [SamplingParams(**{"stop": ("#",), **setting}) for setting in settings]  # type: ignore[arg-type]
    done = run(engine, [Request(row, 0, [65], params[row], row) for row in range(7)])
    assert sum(completion.error is not None for completion in done.values()) == 3  # two overgrown, one not numbers
    assert engine._task._stop_strings == {}


def test_dropping_a_preempted_row_leaves_nothing_behind() -> None:
    runner = ScriptedRunner([codes("abcdefghijkl")] * 2, num_blocks=4, block_size=4)
    engine = Engine(runner, Letters(), EngineConfig(max_model_len=100))
    for row in range(2):
        engine.add(Request(row, 0, [65], SamplingParams(stop=("#",)), row))
    while not engine.stats.num_preemptions:
        engine.step()
    assert [request.row_index for request in engine.drop_waiting()] == [1]
    assert [seq.request.row_index for seq in engine._task._stop_strings] == [0]


def test_rows_without_stop_strings_are_decoded_once() -> None:
    letters = Letters()
    engine = Engine(
        ScriptedRunner([codes("abcdefghij$")] * 3), letters, EngineConfig(max_model_len=50, eos_token_ids=(EOS,))
    )
    run(engine, [Request(row, 0, [65], SamplingParams(), row) for row in range(3)])
    assert letters.num_calls == 3


def test_stats_add_up() -> None:
    engine = fake_engine(64)
    run(engine, requests_of([20, 20, 10], 5))
    stats = engine.stats
    assert stats.num_prompt_tokens == 50
    assert stats.num_prompt_tokens_computed + stats.num_cached_tokens == 50
    assert stats.num_sampled == 15
    # The last token of a row is never run through the model.
    assert stats.num_batched_tokens == stats.num_prompt_tokens_computed + 15 - 3
    assert stats.num_steps >= 5
    assert stats.runner_seconds > 0


def test_samples_of_one_row_share_its_prompt() -> None:
    engine = fake_engine(128)
    prompt = [5 + position % 40 for position in range(48)]
    for sample in range(4):
        engine.add(Request(0, sample, prompt, SamplingParams(n=4, max_tokens=3), sample))
    done = []
    while engine.has_unfinished():
        done += engine.step()
    assert sorted(completion.sample_index for completion in done) == [0, 1, 2, 3]
    assert engine.stats.num_prompt_tokens_computed == 48 + 3 * 16  # the last block of a prompt is each one's own


def test_close_closes_the_runner() -> None:
    runner = ScriptedRunner([codes("a")])
    Engine(runner, Letters(), EngineConfig(max_model_len=50)).close()
    assert runner.closed


def test_the_engine_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['numpy'] = None; import batchjob.engine as e; e.create_engine"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
