import pytest

from batchjob.core import Sequence, Slice, StepPlan


@pytest.fixture
def seq(make_request):
    return Sequence(make_request(0, range(10)), max_len=14)


def test_a_plan_counts_its_tokens_and_lists_what_samples(make_request):
    seqs = [Sequence(make_request(row, range(10)), max_len=14) for row in range(3)]
    plan = StepPlan([Slice(seqs[0], 9, 10)], [Slice(seqs[1], 2, 5), Slice(seqs[2], 0, 10)], sampling=[1])
    assert plan.num_tokens == 14
    assert plan.num_decodes == 1
    assert plan.sampled == [plan.slices[0], plan.slices[2]]
    assert list(plan.sampled_at) == [0, 2]
    assert not plan.decode_only


def test_a_plan_of_single_tokens_that_sample_is_decode_only(seq):
    plan = StepPlan([Slice(seq, 9, 10)])
    assert plan.decode_only
    assert plan.sampled == plan.slices
    assert list(plan.sampled_at) == [0]
    assert plan.num_tokens == 1


def test_a_single_token_that_does_not_sample_is_no_decode(seq):
    assert not StepPlan([], [Slice(seq, 0, 1)]).decode_only


def test_a_sequence_has_its_own_copy_of_the_prompt(make_request):
    request = make_request(0, [1, 2, 3])
    seq = Sequence(request, max_len=9)
    seq.tokens.append(4)
    assert request.token_ids == [1, 2, 3]
    assert (seq.num_prompt_tokens, seq.num_output_tokens, seq.output_token_ids) == (3, 1, [4])
