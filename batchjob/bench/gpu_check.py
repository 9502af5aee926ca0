"""`python -m batchjob.bench.gpu_check`: what a real GPU does with this program, in one command and a bounded time.

Nothing is downloaded: models have published shapes and random weights. Each part runs in a process of its own, gets a
share of the time that is left, and has its findings in the JSON file at once; a part that crashes, hangs or finds no
time left does not stop the others. `--device cpu --tiny` rehearses all of it without a GPU.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from batchjob.bench.gpu_parts import SMOKE, Part, parts_for
from batchjob.bench.gpu_report import headline, table
from batchjob.bench.gpu_task import ROOT, Task, describe, run_task, write_json
from batchjob.bench.limits import Limits

SHAPE_NAMES = ("Qwen3-0.6B", "Qwen3-8B", "Llama-3.1-8B")
# What a part's process has imported when it starts: a new interpreter would take seconds for it, once per part.
_PRELOAD = [
    "torch",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.llama.modeling_llama",
    "batchjob.engine.runner",
]
_GRACE = 1.0  # seconds that a part may take longer than it was given before it is killed


class Check:
    """One run of the command."""

    def __init__(self, args: argparse.Namespace, directory: Path) -> None:
        self._args = args
        self._directory = directory
        self._safer: dict[str, Any] = {}  # than the best settings, where those have failed
        self._deadline = time.monotonic() + args.seconds
        self._context: Any = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOAD)
        self.document: dict[str, Any] = {"seconds": args.seconds, "device": args.device, "tiny": args.tiny, "parts": {}}
        if args.json is not None and args.json.exists():
            known = json.loads(args.json.read_text())
            if (known.get("device"), known.get("tiny")) == (args.device, args.tiny):
                self.document["parts"] = known["parts"]

    def run(self, parts: list[Part]) -> None:
        for part in parts:
            entry = self._run(
                part, {**self._safer, **part.settings} if "gpu_engine" in part.function else part.settings
            )
            if part.name == SMOKE and "limits" not in entry and entry["status"] != "skipped":
                # Whatever was imported may have touched the GPU, which processes that are forked later cannot use then.
                print("smoke failed: once more, with new interpreters", flush=True)
                self._context = multiprocessing.get_context("spawn")
                self.document["interpreters"] = "new ones"
                entry = self._run(part, part.settings)
                if entry.get("no_gpu"):
                    print(headline(part.name, entry), flush=True)
                    return
            for settings in part.retries:
                if entry["status"] in ("ok", "errors", "skipped") or "published" in entry:
                    break
                print(headline(part.name, entry), flush=True)
                failed = {key: entry[key] for key in ("status", "error", "log", "seconds") if key in entry}
                entry = self._run(part, settings, failed_before=failed)
                if "published" in entry and part.name.startswith("best/"):
                    self._safer = settings  # for the parts that follow
            print(headline(part.name, entry), flush=True)

    def _run(self, part: Part, settings: dict[str, Any], **more: Any) -> dict[str, Any]:
        left = self._deadline - time.monotonic() - _GRACE
        if left < part.least * (0.2 if self._args.tiny else 1.0):
            reason = f"{max(0.0, left):.0f} s left, {part.least:.0f} needed"
            return self._save(part, {"status": "skipped", "reason": reason})
        share = max(part.share, 0.5) if self._args.tiny else part.share  # a rehearsal measures no speed
        seconds = min(left, max(part.least, share * self._args.seconds))
        name = "".join(letter if letter.isalnum() else "-" for letter in part.name)
        result, log = self._directory / f"{name}.json", self._directory / f"{name}.log"
        result.unlink(missing_ok=True)
        task = Task(
            function=part.function,
            deadline=time.monotonic() + seconds,
            result_path=str(result),
            log_path=str(log),
            device=self._args.device,
            tiny=self._args.tiny,
            limits=self._limits(),
            settings=settings,
            options=part.options,
        )
        started = time.monotonic()
        process = self._context.Process(target=run_task, args=(task,))
        try:
            process.start()
        except (OSError, EOFError) as error:  # the process that others are forked from has died
            self._context = multiprocessing.get_context("spawn")
            return self._save(part, {"status": "failed", "error": describe(error)})
        process.join(max(0.0, task.deadline + _GRACE - time.monotonic()))
        timed_out = process.is_alive()
        _end(process)
        entry: dict[str, Any] = json.loads(result.read_text()) if result.exists() else {}
        entry["seconds"] = time.monotonic() - started
        entry["allotted"] = seconds
        entry["settings"] = settings
        entry.update(more)
        if timed_out:
            entry["status"] = "timed out"
        elif entry.pop("over", False):
            entry["status"] = "ok" if not entry.get("errors") else "errors"
        else:
            entry["status"] = "failed" if "error" in entry else f"died ({process.exitcode})"
        if entry["status"] != "ok" and log.exists():
            entry["log"] = log.read_text(errors="replace")[-6000:]
        return self._save(part, entry)

    def _save(self, part: Part, entry: dict[str, Any]) -> dict[str, Any]:
        self.document["parts"][part.name] = entry
        if self._args.json is not None:
            write_json(self._args.json, self.document)
        return entry

    def _limits(self) -> Limits | None:
        found = self.document["parts"].get(SMOKE, {}).get("limits")
        return None if found is None else Limits(**found)


def _end(process: Any) -> None:
    """Ends the process and all that it has started: it leads a group of its own."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        if process.is_alive():
            process.kill()
    process.join(10)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m batchjob.bench.gpu_check", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0, help="for everything together [300]")
    parser.add_argument(
        "--json", type=Path, help="file for all findings; parts that it has and that are not run now stay"
    )
    parser.add_argument("--shapes", default=",".join(SHAPE_NAMES), help=f"comma-separated, of {', '.join(SHAPE_NAMES)}")
    parser.add_argument("--parts", help="comma-separated; those whose names contain one of these, such as best,start")
    parser.add_argument("--skip", help="the same, of parts that are left out")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="of the best configuration")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models and workloads: a rehearsal, no measurement")
    parser.add_argument("--list", action="store_true", help="only name the parts")
    args = parser.parse_args(arguments)
    shapes = args.shapes.split(",")
    if unknown := sorted(set(shapes) - set(SHAPE_NAMES)):
        parser.error(f"unknown shapes: {', '.join(unknown)}")
    best = dict(_setting(parser, text) for text in args.set)
    on_cpu = args.device == "cpu"
    parts = [
        part
        for part in parts_for(shapes, best, tiny=args.tiny, on_cpu=on_cpu)
        if (args.parts is None or _matches(part.name, args.parts))
        and (args.skip is None or not _matches(part.name, args.skip))
    ]
    if args.list:
        print("\n".join(part.name for part in parts))
        return 0
    _prepare(on_cpu=on_cpu)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as directory:
        check = Check(args, Path(directory))
        check.run(parts)
    print()
    print(table(check.document))
    entries = [check.document["parts"].get(part.name) for part in parts]
    return int(any(entry is None or _is_bad(entry) for entry in entries))


def _is_bad(entry: dict[str, Any]) -> bool:
    return entry["status"] not in ("ok", "skipped")


def _matches(name: str, wanted: str) -> bool:
    return any(text.strip() in name for text in wanted.split(","))


def _setting(parser: argparse.ArgumentParser, text: str) -> tuple[str, Any]:
    from batchjob.engine.config import EngineConfig

    name, _, value = text.partition("=")
    if name not in asdict(EngineConfig(1)):
        parser.error(f"--set: the engine has no setting {name!r}")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def _prepare(*, on_cpu: bool) -> None:
    """Sets the environment that the processes of the parts inherit."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if on_cpu:
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for path in (ROOT, ROOT / "kernels"):
        if importlib.util.find_spec("batchjob" if path == ROOT else "batchjob_kernels") is None:
            sys.path.append(str(path))


if __name__ == "__main__":
    raise SystemExit(main())
