"""`batchjob slurm`: plans a job now, writes its scripts, warns of site settings that defeat it, and submits it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchjob.errors import UsageError
from batchjob.launch.slurm_scripts import ARRAY, MERGE, Scripts, check_options, submit
from batchjob.launch.slurm_site import read_site, slurm_seconds
from batchjob.slurm.tools import SlurmToolError
from batchjob.spec import JobSpec, refuse_url
from batchjob.store.merge import merge_format

Echo = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class SlurmOptions:
    """The options of the command that are no settings of the job."""

    num_tasks: int
    max_running: int | None = None
    time: str | None = None
    partition: str | None = None
    warning: int = 300
    sbatch: Sequence[str] = ()
    merge_into: str | None = None
    directory: Path = Path("slurm")
    submit: bool = False

    def __post_init__(self) -> None:
        check_options(self.sbatch)
        if self.time is not None and slurm_seconds(self.time) is None:
            raise UsageError(f"--time must be a time as sbatch takes it, such as 04:00:00, not {self.time!r}")
        if self.partition is not None and not (self.partition.isprintable() and " " not in self.partition):
            raise UsageError(f"--partition must be the name of a partition, not {self.partition!r}")

    def sbatch_lines(self) -> list[str]:
        named = (("partition", self.partition), ("time", self.time))
        return [*(f"--{name}={value}" for name, value in named if value is not None), *self.sbatch]


def write_job(
    spec: JobSpec, job_file: str | None, flags: Mapping[str, Any], options: SlurmOptions, echo: Echo
) -> list[Path]:
    """Writes the scripts of a job. `flags` are the settings to repeat in them, beside those of the job file; `spec`
    holds both.

    The output directory is made and planned here, so that no task has to, and a job that cannot run fails now.
    Returns the scripts. Raises a BatchJobError.
    """
    from batchjob.job.open import open_job
    from batchjob.models import check_loadable

    if not spec.output or not spec.input:
        raise UsageError("a job for SLURM needs --output and --input")
    output = spec.output
    refuse_url(options.directory, "--directory")
    if options.merge_into is not None:
        merge_format(options.merge_into)
    spec = spec.replace(num_shards=options.num_tasks)
    wants_gpu = any("gpu" in option for option in options.sbatch) or spec.devices != "auto"
    if wants_gpu and spec.device == "auto" and "cpu" not in spec.devices:
        # The dtype is frozen here, and the machine that tasks are submitted from often has no GPU.
        job = open_job(spec.replace(device="cuda", devices="auto"), echo, check=check_loadable)
    else:
        job = open_job(spec, echo, check=check_loadable)
    num_chunks = len(job.store.plan.chunks)
    job.store.close()
    if num_chunks < options.num_tasks:
        echo(f"warning: the job has {num_chunks:,} chunks: more than that many tasks have nothing to do")
    if job.settings.model is not None and spec.dtype == "auto" and job.settings.device == "cpu":
        echo("warning: no option asks for a GPU, so the dtype is float32 as for a CPU; --dtype says otherwise")
    if spec.deterministic:
        pinned = job.store.manifest.fingerprint["deterministic"]["device"]
        echo(
            f"warning: --deterministic pins the hardware, and that of this machine is {pinned}: tasks on other "
            "hardware end with exit code 78. Where nodes differ from it, plan on one of them (srun)"
        )
    for warning in _site_warnings(spec, options):
        echo(f"warning: {warning}")
    scripts = Scripts(
        output=output,
        flags=flags,
        job_file=job_file,
        num_tasks=options.num_tasks,
        max_running=options.max_running,
        warning=options.warning,
        drain_signal=spec.drain_signal,
        options=options.sbatch_lines(),
        merge_options=[f"--partition={options.partition}"] if options.partition else [],
        program=(sys.executable, "-m", "batchjob"),
        directory=os.getcwd(),
        logs=str(options.directory.absolute() / "logs"),
        merge_into=options.merge_into,
    )
    paths = scripts.write(options.directory)
    for path in paths:
        echo(f"written    {path}")
    if options.submit:
        for path, job_id in zip(paths, submit(paths), strict=True):
            echo(f"submitted  {path} as job {job_id}")
    else:
        where = options.directory
        echo(f"submit it  sbatch {where / ARRAY}")
        if options.merge_into:
            echo(f"and then   sbatch --dependency=afterany:ARRAY_JOB_ID {where / MERGE}")
    return paths


def _site_warnings(spec: JobSpec, options: SlurmOptions) -> list[str]:
    try:
        site = read_site(options.partition)
    except SlurmToolError as error:
        return [f"the site's settings are unknown ({error})"]
    return site.warnings(
        num_tasks=options.num_tasks,
        requeue=spec.requeue,
        seconds=None if options.time is None else slurm_seconds(options.time),
    )
