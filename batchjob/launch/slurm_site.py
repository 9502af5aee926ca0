"""Warnings about a SLURM site's settings, for a job that depends on warning signals and requeues."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from batchjob.errors import StoppedEarlyError
from batchjob.job.stop import TERM_DRAIN_SECONDS
from batchjob.slurm.tools import call

_REQUEUE_CODE = StoppedEarlyError.exit_code


@dataclass(frozen=True, slots=True)
class Site:
    """The settings of a site: `config` of `scontrol show config`, and the job's `partition`; empty where not known."""

    config: Mapping[str, str]
    partition: Mapping[str, str] = field(default_factory=dict)

    @property
    def preempts(self) -> bool:
        return self.config.get("PreemptType", "") not in ("", "(null)", "preempt/none")

    @property
    def preempt_mode(self) -> str:
        """The preemption mode, the partition's if it has one of its own: REQUEUE, CANCEL, SUSPEND, OFF, ... Gang
        scheduling is left out."""
        modes = self.partition.get("PreemptMode") or self.config.get("PreemptMode") or "OFF"
        return modes.upper().replace("GANG,", "").replace(",GANG", "")

    @property
    def sends_user_signal(self) -> bool:
        """True if a preemption sends the job's own warning signal. The setting moved in later releases."""
        settings = self.config.get("SlurmctldParameters", "") + "," + self.config.get("PreemptParameters", "")
        return bool({"preempt_send_user_signal", "send_user_signal"} & set(settings.split(",")))

    @property
    def requeues_exit_code(self) -> bool:
        return str(_REQUEUE_CODE) in re.split(r"[,\s]+", self.config.get("RequeueExit", ""))

    def warnings(self, *, num_tasks: int, requeue: str, seconds: float | None) -> list[str]:
        """The settings that will not work as the scripts intend, a line for each. `seconds` is the time limit asked
        for, None for the site's own."""
        found = []
        largest = _seconds(self.config.get("MaxArraySize", ""))
        if largest is not None and num_tasks > largest:
            found.append(
                f"the site allows {int(largest)} tasks in an array (MaxArraySize), not {num_tasks}: sbatch refuses it"
            )
        allowed = slurm_seconds(self.partition.get("MaxTime", ""))
        if allowed is not None and seconds is not None and seconds > allowed:
            name = self.partition.get("PartitionName", "")
            found.append(f"--time is above MaxTime of partition {name}: the tasks will not start")
        if self.preempts:
            found += self._preemption_warnings()
        kill_wait = _seconds(self.config.get("KillWait", ""))
        if kill_wait is not None and kill_wait < TERM_DRAIN_SECONDS + 5:
            found.append(
                f"KillWait is {kill_wait:g} s: after SIGTERM a task is killed before the {TERM_DRAIN_SECONDS:g} s are "
                "over in which running rows may finish; those are computed again"
            )
        if requeue == "exit" and not self.requeues_exit_code:
            found.append(
                f"RequeueExit does not list {_REQUEUE_CODE}, so nothing requeues a task that exits with it: "
                "use --requeue scontrol"
            )
        if requeue == "scontrol" and self.requeues_exit_code:
            found.append(
                f"RequeueExit lists {_REQUEUE_CODE}: the site requeues a stopped task as well, and `afterok` never "
                "fires on such an array (the merge script waits with `afterany`); --requeue exit leaves it to the site"
            )
        return found

    def _preemption_warnings(self) -> list[str]:
        mode = self.preempt_mode
        if mode == "CANCEL":
            return ["PreemptMode is CANCEL: a preempted task is not requeued; submit the array again, it goes on"]
        if mode != "REQUEUE":
            return []
        if not _seconds(self.partition.get("GraceTime", "0")):
            return ["GraceTime is 0: a preempted task gets no time to finish its running rows; they are computed again"]
        if not self.sends_user_signal:
            return [
                "a preemption does not send the warning signal here (SlurmctldParameters=preempt_send_user_signal, or "
                "PreemptParameters=send_user_signal): a task hears of it at the end of its grace time only"
            ]
        return []


def read_site(partition: str | None = None) -> Site:
    """The site as scontrol describes it. Without a partition it is the site's default one. Raises SlurmToolError."""
    config = parse_config(call(["scontrol", "show", "config"]))
    partitions = parse_partitions(call(["scontrol", "--oneliner", "show", "partition"]))
    for found in partitions:
        if found.get("PartitionName") == partition or (partition is None and found.get("Default") == "YES"):
            return Site(config, found)
    return Site(config)


def parse_config(text: str) -> dict[str, str]:
    """The settings in `Name   = value` lines."""
    pairs = (line.split("=", 1) for line in text.splitlines() if re.match(r"\w+\s*=", line))
    return {name.strip(): value.strip() for name, value in pairs}


def parse_partitions(text: str) -> list[dict[str, str]]:
    """The partitions in the text, which has one a line, as Name=value words."""
    lines = [line for line in text.splitlines() if line.startswith("PartitionName=")]
    return [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in lines]


def slurm_seconds(text: str) -> float | None:
    """Seconds of a time as sbatch takes it: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S. None for an invalid or unlimited
    time."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        return None
    days, *parts = (None if part is None else int(part) for part in match.groups())
    if days is None and parts[2] is None:  # M or M:S
        parts = [0, *parts[:2]]
    hours, minutes, seconds = (part or 0 for part in parts)
    return float((((days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds)


def _seconds(text: str) -> float | None:
    """The number at the start of values such as `30 sec`."""
    match = re.match(r"\d+", text)
    return float(match[0]) if match else None
