"""Claims among the workers of one command."""

from __future__ import annotations

from batchjob.job.observer import Team
from batchjob.spec import JobSpec


def test_what_a_member_had_claimed_is_kept_until_it_is_lost() -> None:
    team = Team("a", 0, 3, JobSpec(num_shards=3, shard_id=1))
    mate = {"team": {"name": "a", "member": 1}}
    assert team.keeps(mate)
    assert not team.keeps({"team": {"name": "a", "member": 0}}), "its own, of a worker before"
    for other in (None, {}, {"team": None}, {"team": {"name": "b", "member": 1}}):
        assert not team.keeps(other)
    team.lost.add(1)
    assert not team.keeps(mate)
    assert [team.may_take(index) for index in range(4)] == [False, True, False, False]
