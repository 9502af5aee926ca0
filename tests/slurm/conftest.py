"""A SLURM of its own for the tests: munged, slurmctld and slurmd on loopback, with files and ports that no other uses.

Everything is skipped, with the reason, where the programs are missing or do not start.
"""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "scancel")
NUM_CPUS = 8  # told to SLURM, however many there are

# cred_expire: a requeued job waits until its credential has expired, 120 s by default. KillWait: likewise shorter.
CONFIG = """\
ClusterName=t
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld_port}
SlurmdPort={d_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=2,sched_interval=2,batch_sched_delay=0
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd.log
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
MinJobAge=3600
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} Boards=1 SocketsPerBoard=1 CoresPerSocket={cpus} ThreadsPerCore=1 \
RealMemory=1000 State=UNKNOWN
PartitionName=low Nodes={host} Default=YES PriorityTier=1 GraceTime=20 MaxTime=INFINITE State=UP
PartitionName=high Nodes={host} PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP
"""


class Cluster:
    """One node, two partitions: `low`, whose jobs are preempted with a warning, and `high`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.env = {**os.environ, "SLURM_CONF": str(root / "slurm.conf")}
        for name in [name for name in self.env if name.startswith("SLURM_") and name != "SLURM_CONF"]:
            del self.env[name]  # these tests may run inside a job themselves

    # -- starting and stopping

    def start(self) -> None:
        """Raises RuntimeError with what the daemons say."""
        for name in ("state", "spool"):
            (self.root / name).mkdir()
        (self.root / "munge.key").write_bytes(os.urandom(128))
        (self.root / "munge.key").chmod(0o600)
        host = socket.gethostname().split(".")[0]
        ctld_port, d_port = free_ports(2)
        user = getpass.getuser()
        self.config = CONFIG.format(
            root=self.root, user=user, cpus=NUM_CPUS, host=host, ctld_port=ctld_port, d_port=d_port
        )
        (self.root / "slurm.conf").write_text(self.config)
        # --force: the socket's directory is closed to others, which is how it should be here.
        names = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        self._daemon(["munged", "--force", *(f"--{flag}={self.root}/munge.{ending}" for flag, ending in names.items())])
        self._daemon(["slurmctld"])
        self._daemon(["slurmd"])
        try:
            self.wait(
                lambda: "idle" in self.call("sinfo", "--noheader", "--format=%t", check=False), "an idle node", 20
            )
        except AssertionError:
            raise RuntimeError(self.logs()) from None

    def configure(self, *lines: str) -> None:
        """The configuration as always, with these lines behind it."""
        (self.root / "slurm.conf").write_text(self.config + "".join(f"{line}\n" for line in lines))
        self.call("scontrol", "reconfigure")

    def _daemon(self, command: list[str]) -> None:
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=30, check=False)
        if done.returncode:
            raise RuntimeError(f"{command[0]}: {done.stderr.strip() or done.stdout.strip()}\n{self.logs()}")

    def stop(self) -> None:
        """Ends all jobs, then the daemons, and waits until they are gone."""
        if (self.root / "slurmctld.pid").exists():
            self.call("scancel", f"--user={getpass.getuser()}", check=False)
            deadline = time.monotonic() + 15
            while self.call("squeue", "--noheader", check=False).strip() and time.monotonic() < deadline:
                time.sleep(0.2)
        for name in ("slurmd", "slurmctld", "munge"):
            try:
                pid = int((self.root / f"{name}.pid").read_text())
            except (OSError, ValueError):
                continue
            for number in (signal.SIGTERM, signal.SIGKILL):
                if not is_running(pid):
                    break
                os.kill(pid, number)
                deadline = time.monotonic() + 10
                while is_running(pid) and time.monotonic() < deadline:
                    time.sleep(0.05)

    def logs(self) -> str:
        found = []
        for name in ("munge", "slurmctld", "slurmd"):
            path = self.root / f"{name}.log"
            if path.is_file():
                found.append(f"{name}: " + " / ".join(path.read_text(errors="replace").splitlines()[-4:]))
        return "\n".join(found)

    # -- use

    def call(self, *command: str | Path, check: bool = True, env: dict[str, str] | None = None) -> str:
        done = subprocess.run(
            [str(part) for part in command],
            env={**self.env, **(env or {})},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def sbatch(self, *arguments: str | Path, env: dict[str, str] | None = None) -> str:
        return self.call("sbatch", "--parsable", *arguments, env=env).strip().split(";")[0]

    def job(self, name: str) -> dict[str, str]:
        """The values that `scontrol show job` prints for one job or array task."""
        line = self.call("scontrol", "--oneliner", "show", "job", name).splitlines()[0]
        return dict(word.split("=", 1) for word in line.split() if "=" in word)

    def state(self, name: str) -> str:
        return self.job(name)["JobState"]

    def start_now(self, name: str) -> None:
        """Spares a requeued task most of the wait for its credential: one of the same second is taken for revoked."""
        time.sleep(2)
        self.call("scontrol", "update", f"jobid={name}", "starttime=now", check=False)

    def wait(self, condition: Callable[[], object], what: str, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"waited {seconds} s for {what}\n{self.call('squeue', check=False)}"
            time.sleep(0.1)

    def wait_for_state(self, name: str, *states: str, seconds: float = 60) -> None:
        self.wait(lambda: self.state(name) in states, f"{name} to be {' or '.join(states)}", seconds)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        pytest.skip(f"no SLURM here ({', '.join(missing)} missing): apt-get install slurm-wlm munge")
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        try:
            cluster.start()
        except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
            pytest.skip(f"SLURM does not start here: {error}")
        yield cluster
    finally:
        cluster.stop()
