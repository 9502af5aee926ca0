"""The batch scripts of a job: an array of tasks over one output, and the merge behind it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from batchjob.errors import UsageError
from batchjob.slurm.tools import SlurmToolError, call
from batchjob.spec import JobSpec

ARRAY, MERGE = "array.sbatch", "merge.sbatch"

_ARRAY = """\
#!/bin/bash
# Written by `batchjob slurm`: one task per shard of one output. Submitted again, it resumes where it stopped, also with
# only some of the tasks (sbatch --array=5,9 {name}).
#SBATCH --job-name=batchjob
#SBATCH --array=0-{last}{throttle}
{options}# Back in the queue after a preemption or a node failure.
#SBATCH --requeue
# Without this, a restart empties the log.
#SBATCH --open-mode=append
# Announces the end this many seconds before it (up to 60 s earlier), to the batch process alone.
#SBATCH --signal=B:{signal}@{warning}
#SBATCH --output={log}
set -euo pipefail
cd {directory}
# The model was fetched when this was written: many tasks asking the hub at once are turned away.
export HF_HUB_OFFLINE=1
# exec: the program itself is then the batch process, and gets SLURM's signals. --num-shards is the same for every task
# and never SLURM_ARRAY_TASK_COUNT, which is smaller when only some tasks are submitted again.
exec {program} run {arguments} \\
  --num-shards {num_tasks} --shard-id "$SLURM_ARRAY_TASK_ID"
"""

_MERGE = """\
#!/bin/bash
# Written by `batchjob slurm`: one file out of a finished job. It refuses while rows are missing (exit code 75), so it
# can wait for the array with `afterany`: `afterok` would wait for ever after one failed task.
#   sbatch --dependency=afterany:ARRAY_JOB_ID {name}
#SBATCH --job-name=batchjob-merge
{options}# On sites that requeue exit code 75, an unfinished job would bring this back again and again.
#SBATCH --no-requeue
#SBATCH --open-mode=append
#SBATCH --output={log}
set -euo pipefail
cd {directory}
exec {program} merge {arguments}
"""


@dataclass(frozen=True, slots=True)
class Scripts:
    """The values in the scripts. `options` go into the array as they are (`--partition=gpu`), `merge_options` into
    the merge. `flags` are the run's, `job_file` its TOML file.
    """

    output: str
    flags: Mapping[str, Any]
    job_file: str | None = None
    num_tasks: int = 1
    max_running: int | None = None
    warning: int = 300  # seconds
    drain_signal: str = "SIGUSR1"
    options: Sequence[str] = ()
    merge_options: Sequence[str] = ()
    program: Sequence[str] = ("batchjob",)
    directory: str = "."  # where the tasks start, so that relative paths hold
    logs: str = "logs"
    merge_into: str | None = None

    def array(self) -> str:
        arguments = [self.job_file] if self.job_file else []
        return _ARRAY.format(
            **self._common(ARRAY, self.options, log="%x-%A_%a.out"),
            last=self.num_tasks - 1,
            throttle=f"%{self.max_running}" if self.max_running else "",
            signal=self.drain_signal.removeprefix("SIG"),
            warning=self.warning,
            num_tasks=self.num_tasks,
            arguments=shlex.join([*arguments, *flag_arguments(self.flags)]),
        )

    def merge(self) -> str:
        arguments = shlex.join([self.output, self.merge_into or ""])
        return _MERGE.format(**self._common(MERGE, self.merge_options, log="%x-%j.out"), arguments=arguments)

    def _common(self, name: str, options: Sequence[str], *, log: str) -> dict[str, str]:
        return {
            "name": name,
            "options": "".join(f"#SBATCH {option}\n" for option in options),
            "log": _log_path(self.logs, log),
            "directory": shlex.quote(self.directory),
            "program": shlex.join(self.program),
        }

    def write(self, where: Path) -> list[Path]:
        """Writes the scripts, and makes the directory of the logs: SLURM does not, and then fails without a message."""
        Path(self.logs).mkdir(parents=True, exist_ok=True)
        where.mkdir(parents=True, exist_ok=True)
        texts = {ARRAY: self.array(), **({MERGE: self.merge()} if self.merge_into else {})}
        for name, text in texts.items():
            (where / name).write_text(text, encoding="utf-8")
        return [where / name for name in texts]


def flag_arguments(values: Mapping[str, Any]) -> list[str]:
    """The command line that gives these values to fields of JobSpec."""
    arguments = []
    for field in fields(JobSpec):
        value = values.get(field.name)
        name = field.name.replace("_", "-")
        if value is None or value == ():
            continue
        if isinstance(value, bool):
            arguments.append(f"--{name}" if value else f"--no-{name}")
            continue
        for item in value if isinstance(value, list | tuple) else (value,):
            text = f"{item[0]}={item[1]!r}" if isinstance(item, tuple) else str(item)
            # One word: a value such as -1 or --- would be taken for a flag.
            arguments.append(f"--{name}={text}")
    return arguments


def check_options(options: Sequence[str]) -> None:
    """Options for #SBATCH lines, one a line. Raises UsageError for text that would end the line or is no option."""
    for option in options:
        if not option.startswith("-") or not option.isprintable():
            raise UsageError(f"--sbatch takes one option of sbatch, such as --sbatch=--gpus=1, not {option!r}")
        name = option.split("=", 1)[0].split(" ", 1)[0]
        if name in ("--array", "-a", "--signal", "--requeue", "--no-requeue", "--open-mode", "--output", "-o"):
            raise UsageError(f"--sbatch must not give {name}: the script sets it")


def submit(paths: Sequence[Path]) -> list[str]:
    """Submits the array, and the merge behind it; returns their job ids. Raises UsageError."""
    ids: list[str] = []
    for path in paths:
        after = [f"--dependency=afterany:{ids[0]}"] if ids else []
        try:
            printed = call(["sbatch", "--parsable", *after, str(path)])
        except SlurmToolError as error:
            raise UsageError(f"{path} was not submitted: {error}") from None
        ids.append(printed.strip().split(";")[0])
    return ids


def _log_path(directory: str, pattern: str) -> str:
    """A path for an #SBATCH line: `%` starts a pattern there, and a blank ends the value unless it is quoted."""
    path = directory.replace("%", "%%") + "/" + pattern
    return f'"{path}"' if " " in path else path
