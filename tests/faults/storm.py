"""Random faults on the real program: signals to any of its processes, and system calls that fail in any of them.

A `Storm` has a seed, which fixes the job, the flags of each run, the victims, the faults, and (but for the scheduling
of the machine) the moments. After every fault what was finished is still there, and right; see `oracle`.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

SIGNALS = [
    *[signal.SIGKILL] * 8, *[signal.SIGSTOP] * 4, *[signal.SIGTERM] * 3, *[signal.SIGINT] * 2, *[signal.SIGUSR1] * 2,
    signal.SIGSEGV, signal.SIGHUP,
]  # fmt: skip
# Call -> the range in which its number is drawn: behind what the interpreter needs to start, mostly.
CALLS = {
    "write": (2, 60),
    "fsync,fdatasync": (1, 20),
    "link,linkat": (1, 6),
    "rename,renameat,renameat2": (1, 5),
    "unlink,unlinkat": (1, 10),
    "mkdir,mkdirat": (1, 12),
    "rmdir": (1, 4),
    "pwrite64": (1, 5),
    "openat": (240, 1250),
    "read": (340, 1700),
    "close": (200, 1100),
    "newfstatat,fstat,statx": (1200, 5000),
    "getdents64": (30, 220),
    "lseek": (250, 1500),
    "mmap": (150, 1650),
    "clone,clone3,vfork": (1, 6),
    "pipe2": (1, 4),
    "ftruncate,fallocate": (1, 2),
    "poll,select,pselect6,ppoll": (1, 40),
    "kill,tgkill": (1, 2),
    "statfs": (1, 3),
}  # fmt: skip
OFTEN, SELDOM = list(CALLS)[:7], list(CALLS)[7:]
ERRORS = [
    "EIO",
    "ENOSPC",
    "EDQUOT",
    "ESTALE",
    "EROFS",
    "EACCES",
    "ENOMEM",
    "EINTR",
    "EAGAIN",
    "EMFILE",
    "ENOENT",
    "EBADF",
]
# What a run may end with when it was only signalled: done, the lease is another's, stopped, restarts did not help, or
# the signal itself.
ENDS = {0, 69, 70, 75} | {-number for number in (*SIGNALS, signal.SIGKILL)}


@dataclass
class Totals:
    """The totals of any number of storms."""

    signals: Counter[tuple[str, str]] = field(default_factory=Counter)  # victim, signal
    faults: Counter[tuple[str, str]] = field(default_factory=Counter)  # victim, call
    ends: Counter[int] = field(default_factory=Counter)
    num_jobs: int = 0
    num_rows: int = 0
    num_twice: int = 0  # samples that more than one process had logged
    num_snapshots: int = 0

    def text(self) -> str:
        def table(counter: Counter[tuple[str, str]]) -> str:
            victims: dict[str, Counter[str]] = {}
            for (victim, what), number in counter.items():
                victims.setdefault(victim, Counter())[what] += number
            return "; ".join(
                f"{victim} {count.total()} ({', '.join(f'{what} {n}' for what, n in count.most_common())})"
                for victim, count in sorted(victims.items())
            )

        return (
            f"{self.num_jobs} jobs, {self.num_rows} rows, {sum(self.ends.values())} runs ended {dict(self.ends)}, "
            f"{self.num_snapshots} looks, {self.num_twice} samples logged twice\n"
            f"  signals {self.signals.total()}: {table(self.signals)}\n"
            f"  failed calls {self.faults.total()}: {table(self.faults)}"
        )


def write_rows(path: Path, rng: random.Random, first: int, num_rows: int) -> Path:
    """Rows of all kinds that a job may meet."""
    rows: list[Any] = []
    for n in range(first, first + num_rows):
        words = " ".join(
            rng.choice(["row", "number", "bal", "mone", "a", "Zürich", f"w{n}"]) for _ in range(rng.randrange(1, 30))
        )
        row: dict[str, Any] = {"n": n, "name": f"r{n} \u00e9\u2028\U0001f642", "prompt": f"{n} {words}"}
        row["meta"] = {"a": [n, None, 0.5], "b": "x" * rng.randrange(20)}
        kind = rng.randrange(12)
        if kind == 0:
            row["params"] = {"n": rng.randrange(1, 4), "seed": n % 5}
        elif kind == 1:
            row["params"] = {"ignore_eos": True, "max_tokens": rng.randrange(5, 60)}
        elif kind == 2:
            row["params"] = {"min_tokens": rng.randrange(1, 20)}
        elif kind == 3:
            row["prompt"] = None
        elif kind == 4:
            row["params"] = {"nonsense": 1}
        rows.append(None if kind == 5 and path.suffix != ".parquet" else row)
    if path.suffix == ".parquet":
        for row in rows:
            row["meta"] = json.dumps(row["meta"])
            row["params"] = json.dumps(row["params"]) if "params" in row else None
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=rng.randrange(10, 200))
        return path
    lines = ["no row" if row is None else json.dumps(row, ensure_ascii=rng.random() < 0.5) for row in rows]
    text = "\n".join(lines) + ("\n" if rng.random() < 0.7 else "")
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@dataclass
class Storm:
    """One job and what happens to it."""

    seed: int
    folder: Path
    environment: Callable[..., dict[str, str]]  # of a run
    oracle: type[Any]
    totals: Totals
    num_rows: int = 250

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(self.seed)
        self.output = self.folder / f"out{self.seed}"
        self.log = self.folder / f"log{self.seed}"
        self.ending = rng.choice([".jsonl", ".jsonl", ".jsonl.gz", ".parquet"])
        files = [write_rows(self.folder / f"in{self.seed}{self.ending}", rng, 0, self.num_rows)]
        n, max_tokens = rng.choice([1, 1, 2]), rng.choice([None, None, 7])
        self.expected = self.oracle(files, n, rng.choice([0, 9]), max_tokens)
        fixed = ["--engine", "fake", "--output", str(self.output), "--n", str(n), "--seed", str(self.expected.seed)]
        fixed += ["--chunk-rows", str(rng.choice([9, 25, 60])), "--max-error-rate", "1", "--progress", "none"]
        self.fixed = fixed + ([] if max_tokens is None else ["--max-tokens", str(max_tokens)])
        self.step = rng.choice([0.005, 0.01, 0.03])
        self.is_extended = False
        self.kept: dict[Any, str | None] = {}
        self.twice: set[Any] = set()
        self.processes: list[subprocess.Popen[bytes]] = []
        self.places: list[list[str]] = [[]]  # flags of each writer that say which part is its own
        self.totals.num_jobs += 1

    # -- runs

    def command(self, *more: str) -> list[str]:
        inputs = [word for path in self.expected.files for word in ("--input", str(path))]
        extend = ["--extend"] if self.is_extended else []
        return [sys.executable, "-m", "batchjob", "run", *inputs, *self.fixed, *extend, *more]

    def free_flags(self) -> list[str]:
        """Those that may differ from run to run."""
        rng = self.rng
        flags = ["--max-num-seqs", str(rng.choice([2, 4, 8, 32])), "--flush-interval", str(rng.choice([0.01, 0.05, 5]))]
        flags += ["--save-partial", str(rng.choice([0, 1, 16])), "--drain-timeout", str(rng.choice([0.05, 2]))]
        flags += ["--order", rng.choice(["auto", "input", "length", "prefix"])]
        flags += rng.choice(
            [[], ["--max-num-batched-tokens", "32"], ["--no-prefix-caching"], ["--async-scheduling", "on"]]
        )
        flags += rng.choice([[], [], ["--no-supervisor"], ["--devices", "cpu,cpu"], ["--stall-timeout", "1.5"]])
        return flags

    def start(self, *more: str, under: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            command = [*under, *self.command(*self.free_flags(), *more)]
            log.write(f"\n$ {' '.join(command)}\n".encode())
            log.flush()
            environment = self.environment(FAULTS_STEP=str(self.step))
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log, process_group=0)

    def look(self) -> None:
        """Checks that every finished row is there, and right."""
        found, twice = self.expected.finished(self.output)
        lost = {key for key, text in self.kept.items() if found.get(key, "") != text}
        assert not lost, f"seed {self.seed}: lost or changed: {sorted(lost)[:9]}\n{self.last_lines()}"
        self.kept = found
        self.twice |= twice
        self.totals.num_snapshots += 1

    def is_done(self) -> bool:
        return (self.output / ".batchjob" / "done.json").exists()

    def finish(self, *, is_tidy: bool = True) -> None:
        """As a person would: the same command until it says that it is done. Then everything is compared."""
        self.look()
        self.step = 0.0
        for _ in range(5):
            process = self.start(*([] if self.rng.random() < 0.5 else ["--no-lease"]))
            code = self.wait(process)
            self.totals.ends[code] += 1
            if code == 0:
                break
            assert code in (75, 69), f"seed {self.seed}: a run left alone ended with {code}\n{self.last_lines()}"
        self.look()
        self.expected.check_complete(self.output, is_tidy=is_tidy)
        self.totals.num_twice += len(self.twice)
        self.totals.num_rows += len(self.expected.carried)
        shutil.rmtree(self.output)

    def wait(self, process: subprocess.Popen[bytes], seconds: float = 240) -> int:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            for pid, _ in tree(process.pid):
                kill(pid, signal.SIGKILL)
            process.wait()
            raise AssertionError(f"seed {self.seed}: it does not end\n{self.last_lines()}") from None

    def last_lines(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]

    def close(self) -> None:
        for process in self.processes:
            for pid, _ in tree(process.pid):
                kill(pid, signal.SIGKILL)
            process.wait()

    def maybe_extend(self) -> None:
        if not self.is_extended and self.rng.random() < 0.1:
            self.is_extended = True
            path = self.folder / f"more{self.seed}{self.ending}"
            self.expected.files.append(write_rows(path, self.rng, self.num_rows, self.rng.randrange(1, 80)))
            self.expected.read()

    # -- signals

    def signals(self, num_signals: int) -> int:
        """Sends up to so many; fewer if the job is done before. Returns how many were sent."""
        rng = self.rng
        kind = rng.choice(["one", "overlap", "overlap", "overlap", "shards", "steal"])
        number = 1 if kind == "one" else rng.choice([2, 3])
        shard = ["--steal"] if kind == "steal" else []
        self.places = [
            {"one": [], "overlap": ["--no-lease"]}.get(
                kind, ["--num-shards", str(number), "--shard-id", str(i), *shard]
            )
            for i in range(number)
        ]
        self.processes = [self.start(*place) for place in self.places]
        sent = 0
        started = time.monotonic()
        if kind == "overlap":
            time.sleep(rng.random() * 2)
        while sent < num_signals and not self.is_done() and time.monotonic() < started + 90:
            time.sleep(rng.random() * rng.choice([0.05, 0.3, 1.0]))
            if rng.random() < 0.1:
                time.sleep(2.5)  # all are at work for once
            sent += self.strike(rng.randrange(number))
            self.go_on()
            self.look()
            self.maybe_extend()
        for process in self.processes:
            for pid, _ in tree(process.pid):
                kill(pid, signal.SIGCONT)
            if rng.random() < 0.5:
                process.kill()
            code = self.wait(process)
            self.totals.ends[code] += 1
        self.finish()
        return sent

    def strike(self, number: int) -> int:
        """Any process of one writer."""
        alive = tree(self.processes[number].pid)
        if not alive:
            return 0
        children = [(pid, victim) for pid, victim in alive if victim in ("worker", "tokeniser")]
        if not children and self.rng.random() < 0.6:
            return 0  # most are left alone while they start
        pid, victim = self.rng.choice(children if self.rng.random() < 0.6 and children else alive)
        what = self.rng.choice(SIGNALS)
        if not kill(pid, what):
            return 0
        self.totals.signals[victim, what.name] += 1
        if what is signal.SIGSTOP:
            time.sleep(self.rng.choice([0.02, 0.3, 2.0]))
            kill(pid, signal.SIGCONT)
        return 1

    def go_on(self) -> None:
        for number, process in enumerate(self.processes):
            if (code := process.poll()) is None:
                continue
            self.totals.ends[code] += 1
            if code == 1 and "\nKeyboardInterrupt" in self.last_lines()[-3000:]:
                code = -signal.SIGINT  # it came while the interpreter itself started or ended
            if code == 66 and self.is_extended:
                code = 0  # begun before the new file came: it says that the file is to be added to --input
            assert code in ENDS, f"seed {self.seed}: ended with {code}\n{self.last_lines()}"
            if not self.is_done():
                self.processes[number] = self.start(*self.places[number])

    # -- system calls

    def failures(self, num_runs: int) -> None:
        """Runs in each of which some system calls fail, or are the last of their process, wherever they are made."""
        trace = self.folder / f"trace{self.seed}"
        for _ in range(num_runs):
            rng = self.rng
            struck = [*rng.sample(OFTEN, rng.choice([2, 3, 5])), *rng.sample(SELDOM, rng.choice([0, 0, 1]))]
            inject = [word for calls in struck for word in ("-e", f"inject={self.injection(calls)}")]
            traced = ",".join(["execve", "clone", "clone3", "vfork", *struck])
            under = ["strace", "-f", "-qq", "-s", "64", "-o", str(trace), "-e", f"trace={traced}"]
            beside = [self.start("--no-lease")] if rng.random() < 0.25 else []
            flags = ["--no-lease"] if beside else []
            if any("KILL" in word for word in inject):  # strace kills each new worker, and a supervisor is patient
                flags.append("--no-supervisor")
            self.processes = [self.start(*flags, under=[*under, *inject]), *beside]
            for process in self.processes:
                self.totals.ends[self.wait(process)] += 1
            faults, signals = hits(trace)
            self.totals.faults += faults
            self.totals.signals += signals
            trace.unlink()
            if self.output.exists():
                self.look()
            if self.is_done():
                break
            self.maybe_extend()
        self.finish(is_tidy=False)

    def injection(self, calls: str) -> str:
        rng = self.rng
        first, last = CALLS[calls]
        when = str(rng.randrange(first, last + 1)) + rng.choice(["", f"+{rng.randrange(1, 2 + last // 4)}"])
        kind = rng.random()
        if kind < 0.15:
            return f"{calls}:signal={rng.choice(['KILL', 'KILL', 'TERM', 'INT', 'USR1'])}:when={when.partition('+')[0]}"
        if kind < 0.25:
            return f"{calls}:delay_exit={rng.choice([1000, 50_000])}:when={when}"
        return f"{calls}:error={rng.choice(ERRORS)}:when={when}"


def kill(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def tree(pid: int) -> list[tuple[int, str]]:
    """A writer's processes and what each of them is."""
    found: list[tuple[int, str]] = []
    waiting = [pid]
    while waiting:
        pid = waiting.pop()
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            tasks = list(Path(f"/proc/{pid}/task").iterdir())
        except OSError:
            continue
        if words == [b""]:
            continue  # it is gone, or just being made
        found.append((pid, role(words)))
        for task in tasks:
            try:
                waiting += map(int, (task / "children").read_text().split())
            except OSError:
                continue
    return found


def role(words: Sequence[bytes]) -> str:
    if b"batchjob.supervisor.worker" in words:
        return "worker"
    if b"batchjob.prompts.feeder" in words:
        return "tokeniser"
    if b"batchjob" in words:
        return "all in one" if b"--no-supervisor" in words else "supervisor"
    return "other"


_EXEC = re.compile(r'^(\d+) +execve\("[^"]*", \[(.*?)\]')
_CLONE = re.compile(r"^(\d+) +(?:<\.\.\. )?(?:clone3?|vfork)[ (].* = (\d+)$")
_FAILED = re.compile(r"^(\d+) +(?:<\.\.\. )?(\w+)[ (].*\(INJECTED\)")
_CAME = re.compile(r"^(\d+) +--- (SIG\w+) \{.*si_code=SI_KERNEL\}")  # strace's own
_KILLED = re.compile(r"^(\d+) +\+\+\+ killed by (SIGKILL) ")


def hits(trace: Path) -> tuple[Counter[tuple[str, str]], Counter[tuple[str, str]]]:
    """Which calls failed, and which signals came, in which process; threads are counted with theirs."""
    faults, signals = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    roles: dict[str, str] = {}
    leaders: set[str] = set()
    for line in trace.read_text(errors="replace").splitlines():
        if (match := _EXEC.match(line)) is not None:
            leaders.add(match[1])
            roles[match[1]] = role([word.strip('", ').encode() for word in match[2].split('", "')])
        elif (match := _FAILED.match(line)) is not None:
            faults[roles.get(match[1], "other"), match[2]] += 1
        elif (match := _CLONE.match(line)) is not None:
            roles.setdefault(match[2], roles.get(match[1], "other"))
        elif (match := _CAME.match(line)) is not None or ((match := _KILLED.match(line)) and match[1] in leaders):
            signals[roles.get(match[1], "other"), match[2]] += 1
    return faults, signals
