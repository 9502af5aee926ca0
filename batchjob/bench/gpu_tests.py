"""The kernels' tests on the device, by pytest in several processes at once, since most of their time is compilation."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from batchjob.bench.gpu_task import ROOT, Report, Task, environment

_MOST_PROCESSES = 8
_TEST = re.compile(r"^tests/\S+?::.+$", re.MULTILINE)
_OUTCOME = re.compile(r" (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b")
_COUNT = re.compile(r"(\d+) (passed|failed|errors?|skipped|xfailed)\b")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.+)$", re.MULTILINE)
_SEEN_ERROR = re.compile(r"^(\S.*?\S) +(\w+) +(\S+) +(\d+) cases$", re.MULTILINE)


def kernel_tests(task: Task, report: Report) -> None:
    """Every kernel test, dealt out to processes: after a CUDA error in one, the others go on.

    Options: `files` (a pattern), `select` (pytest's -k). Works with pytest alone: the project's own settings ask for a
    plugin, and its conftest for more packages.
    """
    directory = ROOT / "tests" / "kernels"
    command = [sys.executable, "-m", "pytest", "--rootdir", str(ROOT), "-p", "no:cacheprovider"]
    command += [f"--confcutdir={directory}", "-o", "addopts=--import-mode=importlib", "-o", "filterwarnings="]
    files = [str(path.relative_to(ROOT)) for path in sorted(directory.glob(task.options.get("files", "test_*.py")))]
    select = ["-k", task.options["select"]] if "select" in task.options else []
    collect = [*command, "--collect-only", "-q", "-m", "not long", *select, *files]
    done = subprocess.run(collect, capture_output=True, text=True, cwd=ROOT, env=environment(), check=False)
    tests = _TEST.findall(done.stdout)
    report.add(collected=len(tests))
    if done.returncode not in (0, 5):  # a file that cannot be imported; the others are run
        report.add(errors={"collection": done.stdout[-2000:]})
    if not tests:
        raise RuntimeError(f"no tests were found: {done.stdout[-1000:]}{done.stderr[-1000:]}")
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as name:
        texts, cut_off = _run(command, tests, Path(name), report)
    report.add(tests=_summary(texts))
    failed = [line for text in texts for line in _FAILED.findall(text)]
    if failed or cut_off:
        errors = report.values.get("errors", {})
        if failed:
            errors["tests"] = f"{len(failed)} failed"
        if cut_off:
            errors["time"] = f"{cut_off} of {len(texts)} processes were cut off"
        report.add(errors=errors, failed=failed[:100])
        report.add(tails=[text[-2500:] for text in texts if _FAILED.search(text)][:4])
    largest: dict[str, float] = {}
    for text in texts:
        for kernel, dtype, error, _ in _SEEN_ERROR.findall(text):
            largest[f"{kernel}, {dtype}"] = max(largest.get(f"{kernel}, {dtype}", 0.0), float(error))
    report.add(largest_relative_errors=largest)


def _run(command: list[str], tests: list[str], directory: Path, report: Report) -> tuple[list[str], int]:
    """The output of each process, and how many had to be stopped."""
    count = max(1, min(_MOST_PROCESSES, (os.cpu_count() or 1) // 2, len(tests)))
    processes = []
    for index in range(count):
        names, output = directory / f"{index}.txt", directory / f"{index}.log"
        names.write_text("\n".join(tests[index::count]) + "\n")
        with output.open("w") as file:
            run = [*command, "-v", "-s", "--tb=short", "-rfE", f"@{names}"]
            processes.append(
                (subprocess.Popen(run, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=environment()), output)
            )
    cut_off = 0
    while any(process.poll() is None for process, _ in processes) and report.seconds_left > 2:
        time.sleep(0.1)
    for process, _ in processes:
        if process.poll() is None:
            cut_off += 1
            process.kill()
            process.wait()
    return [output.read_text(errors="replace") for _, output in processes], cut_off


def _summary(texts: list[str]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for text in texts:
        found = _COUNT.findall(text.rstrip().rpartition("\n")[2])
        if found:
            counts.update({name.rstrip("s") if name == "errors" else name: int(number) for number, name in found})
        else:  # cut off
            counts.update(outcome.lower() for outcome in _OUTCOME.findall(text))
    return dict(counts)
