"""The command line: reads flags and job files into a `JobSpec`, calls the package that does the work, prints, exits.

Nothing heavy is imported here: `batchjob --help` must answer at once. Only this file knows click.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

import click

from batchjob import __version__
from batchjob.errors import BatchJobError, StoppedEarlyError, UsageError
from batchjob.report import console
from batchjob.spec import JobSpec, flag, load_toml, spec_fields

_TYPES: dict[str, Any] = {"str": str, "int": int, "float": float}
_HEADINGS = {
    "data": "Model and data",
    "prompt": "Prompts",
    "sampling": "Sampling",
    "engine": "Engine",
    "job": "Job",
    "other": "Other",
}
_REPEATABLE = {"input", "stop", "stop_token_ids", "logit_bias"}


class _BiasType(click.ParamType):  # type: ignore[type-arg]  # generic only from click 8.5 on
    name = "id=bias"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            token, amount = str(value).split("=", 1)
            return int(token), float(amount)
        except ValueError:
            self.fail(f"{value!r} is not of the form ID=BIAS, such as 50256=-100", param, ctx)


def _option(f: Field[Any]) -> Callable[[Any], Any]:
    """The click option of one JobSpec field; every default is None, so that a flag that is given can be told from one
    that is not."""
    kind = str(f.type).split(" ")[0]
    help_text = f.metadata["help"]
    if not isinstance(f.default, bool) and f.default not in (None, ()) and "[default" not in help_text:
        help_text += f" [default: {f.default:g}]" if kind == "float" else f" [default: {f.default}]"
    if kind == "bool":  # both spellings, so that a flag can undo what a job file sets
        positive = f.name.replace("_", "-")
        help_text += " [default: on]" if f.default is True else ""
        return click.option(f"--{positive}/--no-{positive}", f.name, default=None, help=help_text)
    if f.name in _REPEATABLE:
        item: Any = {"stop_token_ids": int, "logit_bias": _BiasType()}.get(f.name, str)
        return click.option(flag(f.name), f.name, multiple=True, type=item, default=None, help=help_text)
    choices = f.metadata["choices"]
    kind_type: Any = click.Choice(choices) if choices else _TYPES[kind]
    return click.option(flag(f.name), f.name, type=kind_type, default=None, help=help_text)


class _JobCommand(click.Command):
    """Lists the options of a job under the headings of their sections."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections = {f.name: f.metadata["section"] for f in spec_fields()}
        lists: dict[str, list[tuple[str, str]]] = {name: [] for name in _HEADINGS}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                lists[sections.get(parameter.name or "", "other")].append(record)
        for name, records in lists.items():
            if records:
                with formatter.section(_HEADINGS[name]):
                    formatter.write_dl(records)


def _job_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for f in reversed(spec_fields()):
        command = _option(f)(command)
    return click.argument("job_file", required=False, metavar="[JOB.toml]")(command)


def _spec(job_file: str | None, flags: dict[str, Any]) -> JobSpec:
    values: dict[str, Any] = load_toml(job_file) if job_file else {}
    values.update({name: value for name, value in flags.items() if value is not None and value != ()})
    return JobSpec(**values)


class _Group(click.Group):
    """Turns a BatchJobError into one line on stderr and its exit code; `--debug` keeps the traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BatchJobError as error:
            if ctx.params.get("debug"):
                raise
            console.echo(f"batchjob: {error}")
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:  # before a job handles signals itself; not a bug
            console.echo("batchjob: stopped (SIGINT): finished rows are safe; run the same command again to continue")
            ctx.exit(StoppedEarlyError.exit_code)
        except BrokenPipeError:
            # The reader of our output has closed it (`batchjob status | head`): not an error.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(0)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="batchjob")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(debug: bool) -> None:
    """Run a large set of prompts through a language model; a job that is killed loses no finished row.

    A job is flags, or a TOML file that flags override. The same command resumes a job that stopped.
    """
    console.prepare_standard_files()


@main.command(cls=_JobCommand)
@_job_options
@click.option("--no-supervisor", is_flag=True, help="Run in this process: nothing restarts it. For debugging.")
def run(job_file: str | None, no_supervisor: bool, **flags: Any) -> None:
    """Run a job, or resume one that stopped. Rows go to OUTPUT/data as Parquet.

    JOB.toml holds settings under the names of the flags; flags override them.
    """
    # Arrow's own allocator keeps the pages of every commit; the system's gives them back: 45 MB at a million rows.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    spec = _spec(job_file, flags)
    console.ignore_hangup()
    if not no_supervisor:
        from batchjob.supervisor import supervise

        sys.exit(supervise(spec, echo=console.echo, debug=click.get_current_context().find_root().params["debug"]))
    from batchjob.job.run import run as run_job

    sys.exit(run_job(spec, echo=console.echo).exit_code)


@main.command(cls=_JobCommand)
@_job_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def validate(job_file: str | None, as_json: bool, **flags: Any) -> None:
    """Check a job without running it: bad rows, too-long rows, duplicate ids, token lengths, shared prefixes."""
    from batchjob.job.validate import validate as validate_job

    report = validate_job(_spec(job_file, flags))
    click.echo(json.dumps(report.to_dict(), indent=2, default=str) if as_json else console.safe(report.render()))
    sys.exit(report.exit_code)


@main.command(cls=_JobCommand)
@_job_options
@click.option("--array", "num_tasks", type=click.IntRange(min=1), required=True, help="Number of tasks of the array.")
@click.option(
    "--max-running", type=click.IntRange(min=1), help="Most tasks that run at a time. [default: as many as fit]"
)
@click.option("--time", help="Time limit of a task, such as 04:00:00. [default: the partition's]")
@click.option("--partition", help="[default: the site's]")
@click.option("--warning", type=click.IntRange(1, 65535), default=300, help="Seconds before the end. [default: 300]")
@click.option("--sbatch", multiple=True, help="Option for the array, such as --sbatch=--gpus=1 (repeatable).")
@click.option("--merge", "merge_into", help="Also write a script that merges the finished job into this file.")
@click.option(
    "--directory",
    type=click.Path(path_type=Path),
    default=Path("slurm"),
    help="Where the scripts and logs go. [default: slurm]",
)
@click.option("--submit", is_flag=True, help="Submit the array, and the merge after it.")
def slurm(job_file: str | None, **flags: Any) -> None:
    """Plan a job, write the scripts of a SLURM array for it, and warn of site settings that break it.

    Takes the settings of `batchjob run`. The default of --requeue is scontrol here.
    """
    from batchjob.launch.slurm import SlurmOptions, write_job

    options = SlurmOptions(**{field.name: flags.pop(field.name) for field in fields(SlurmOptions)})
    if flags["num_shards"] is not None or flags["shard_id"] is not None:
        raise UsageError("--array gives each task its shard: leave out --num-shards and --shard-id")
    if flags["requeue"] is None and "requeue" not in (load_toml(job_file) if job_file else {}):
        flags["requeue"] = "scontrol"
    write_job(_spec(job_file, flags), job_file, flags, options, echo=lambda line: click.echo(line, err=True))


@main.command()
@click.argument("output", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def status(output: Path, as_json: bool) -> None:
    """Show how far a job is. Exit code 0 when it is complete, 75 when rows are missing."""
    from batchjob.report.result import render_status, status_json
    from batchjob.store.status import job_status

    state = job_status(output)
    click.echo(json.dumps(status_json(state), indent=2) if as_json else console.safe(render_status(state)))
    sys.exit(0 if state.complete else StoppedEarlyError.exit_code)


@main.command()
@click.argument("output", type=click.Path(path_type=Path))
@click.argument("destination")
@click.option(
    "--format",
    "file_format",
    type=click.Choice(("parquet", "jsonl")),
    default=None,
    help="Format of DESTINATION. [default: from its ending]",
)
@click.option("--partial", is_flag=True, help="Merge the finished rows although others are missing.")
def merge(output: Path, destination: str, file_format: str | None, partial: bool) -> None:
    """Merge the parts of a job, in input order, into one Parquet or JSONL file.

    A DESTINATION that ends in / becomes a directory of larger Parquet files.
    """
    from batchjob.store.merge import merge as merge_parts

    num_rows = merge_parts(output, destination, file_format, partial=partial)
    click.echo(f"{num_rows:,} rows merged into {destination}")
