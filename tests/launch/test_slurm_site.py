"""Warnings about a site's settings: texts as `scontrol show` prints them, and the warnings made of them."""

from __future__ import annotations

import pytest

from batchjob.launch.slurm_site import Site, parse_config, parse_partitions, slurm_seconds

CONFIG = """\
Configuration data as of 2025-11-29T16:00:00
JobRequeue              = 1
KillWait                = 30 sec
MaxArraySize            = 1001
PreemptMode             = REQUEUE
PreemptType             = preempt/partition_prio
RequeueExit             = (null)
SlurmctldParameters     = preempt_send_user_signal,idle_on_node_suspend

Slurmctld(primary) at host is UP
"""
PARTITIONS = """\
PartitionName=low AllowGroups=ALL Default=YES GraceTime=120 MaxTime=1-00:00:00 PreemptMode=REQUEUE State=UP
PartitionName=high AllowGroups=ALL Default=NO GraceTime=0 MaxTime=UNLIMITED PreemptMode=OFF State=UP
"""
GOOD = Site(parse_config(CONFIG), parse_partitions(PARTITIONS)[0])


def site(*, partition: dict[str, str] | None = None, **config: str) -> Site:
    return Site({**GOOD.config, **config}, {**GOOD.partition, **(partition or {})})


def warnings(site: Site, *, num_tasks: int = 64, requeue: str = "scontrol", seconds: float | None = 3600) -> str:
    return "\n".join(site.warnings(num_tasks=num_tasks, requeue=requeue, seconds=seconds))


def test_what_scontrol_prints_is_read() -> None:
    assert GOOD.config["KillWait"] == "30 sec"
    assert [partition["PartitionName"] for partition in parse_partitions(PARTITIONS)] == ["low", "high"]
    assert GOOD.preempts
    assert GOOD.sends_user_signal


def test_a_site_that_does_all_it_should_is_not_warned_of() -> None:
    assert warnings(GOOD) == ""
    assert warnings(Site({})) == ""


@pytest.mark.parametrize(
    ("changed", "arguments", "message"),
    [
        (site(PreemptMode="CANCEL", partition={"PreemptMode": "CANCEL"}), {}, "PreemptMode is CANCEL"),
        (site(PreemptMode="GANG,CANCEL", partition={"PreemptMode": "GANG,CANCEL"}), {}, "PreemptMode is CANCEL"),
        (site(partition={"GraceTime": "0"}), {}, "GraceTime is 0"),
        (site(SlurmctldParameters="(null)"), {}, "does not send the warning signal"),
        (site(KillWait="5 sec"), {}, "KillWait is 5 s"),
        (GOOD, {"requeue": "exit"}, "RequeueExit does not list 75"),
        (site(RequeueExit="1,75"), {}, "RequeueExit lists 75"),
        (GOOD, {"num_tasks": 1002}, "1001 tasks in an array"),
        (GOOD, {"seconds": 86401}, "above MaxTime of partition low"),
    ],
)
def test_a_setting_that_defeats_the_scripts_is_named(changed: Site, arguments: dict[str, int], message: str) -> None:
    text = warnings(changed, **arguments)  # type: ignore[arg-type]
    assert message in text
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize(
    ("changed", "arguments"),
    [
        (site(PreemptType="preempt/none", SlurmctldParameters="", partition={"GraceTime": "0"}), {}),
        (site(SlurmctldParameters="", PreemptParameters="send_user_signal"), {}),
        (site(RequeueExit="75"), {"requeue": "exit"}),
        (site(RequeueExit="175"), {}),
        (GOOD, {"num_tasks": 1001, "seconds": 86400}),
        (site(partition={"MaxTime": "UNLIMITED"}), {"seconds": 1e9}),
    ],
)
def test_no_warning_without_a_reason(changed: Site, arguments: dict[str, int]) -> None:
    assert warnings(changed, **arguments) == ""  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("4:30", 270),
        ("04:00:00", 14400),
        ("1-12", 36 * 3600),
        ("1-12:30", 36.5 * 3600),
        ("1-00:00:01", 86401),
        ("UNLIMITED", None),
        ("", None),
        ("soon", None),
    ],
)
def test_times_as_sbatch_takes_them(text: str, seconds: float | None) -> None:
    assert slurm_seconds(text) == seconds
