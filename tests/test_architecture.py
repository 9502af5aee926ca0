"""The import arrows. A room that starts to import what it must not know fails here, with the line named.

cli -> supervisor, worker -> job
cli -> job -> {engine, store, io, prompts, feeder, models, progress} -> core -> {records, sampling, spec, errors}
batchjob_kernels -> torch
"""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PLAIN = {"errors", "sampling", "spec", "records", "plan"}
ROOMS = {"core", "engine", "store", "io", "prompts", "tokenizer", "feeder", "models"}
# The files that `job` is made of.
JOB = {
    "backlog", "console", "extend", "firstrows", "job", "loop", "preflight", "prepare", "progress", "redact",
    "sharding", "signals", "slurm", "stealing", "stopping", "summary", "timelimit", "validate", "watch",
}  # fmt: skip

# Room -> rooms it may import (itself included without saying so). `job` and `cli` know everybody below them.
ARROWS: dict[str, set[str]] = {
    "__init__": {"errors", "spec", "job"},
    "__main__": {"cli"},
    "errors": set(),
    "sampling": {"errors"},
    "spec": {"errors", "sampling"},
    "records": {"errors", "sampling", "spec"},
    "plan": {"errors"},
    "jsonvalues": set(),
    "devices": {"errors", "spec"},
    "core": {"records", "sampling", "errors"},
    "engine": PLAIN | {"core", "models"},
    "store": PLAIN | {"jsonvalues"},
    "io": PLAIN | {"jsonvalues"},
    "models": PLAIN,
    "tokenizer": PLAIN | {"models"},
    "prompts": PLAIN | {"tokenizer"},
    "feeder": PLAIN | {"io", "prompts", "tokenizer"},
    **dict.fromkeys(JOB, PLAIN | ROOMS | JOB | {"devices", "notes"}),
    "cli": PLAIN | ROOMS | JOB | {"bench", "supervisor"},
    "bench": PLAIN | ROOMS | JOB,
    "supervisor": PLAIN
    | {"devices", "notes", "progress", "signals", "slurm", "stopping", "summary", "timelimit", "watch"},
    "worker": PLAIN | JOB | {"supervisor", "orphan"},
    "orphan": set(),
    "notes": set(),
}

# Third-party package -> who may import it. Files are given as paths under batchjob/ without the ending.
NO_TORCH_IN_ENGINE = {"engine/__init__", "engine/config", "engine/engine", "engine/fake", "engine/stops"}
THIRD_PARTY: dict[str, set[str]] = {
    "click": {"cli"},
    "pyarrow": {"io", "store", "jsonvalues", "bench"},
    "zstandard": {"io"},
    "torch": {"engine", "bench"},
    "transformers": {"engine", "tokenizer", "bench"},
    "tokenizers": {"tokenizer"},
    "jinja2": {"prompts", "tokenizer"},
    "huggingface_hub": {"models"},
    "safetensors": {"engine"},
    "gguf": {"engine"},
    "batchjob_kernels": {"engine", "bench"},
    "tqdm": {"progress"},
    "numpy": {"engine", "io", "bench"},
}


class Import(NamedTuple):
    module: str  # dotted, absolute
    line: int


def sources(package: Path) -> list[Path]:
    return sorted(path for path in package.rglob("*.py") if "__pycache__" not in path.parts)


def imports(path: Path, package: str) -> Iterator[Import]:
    """Every import of a file but those for type checkers alone, which nothing runs."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [base])])
            for alias in node.names:
                yield Import(f"{base}.{alias.name}", node.lineno)


def room_of(relative: Path) -> str:
    """`engine/model.py` -> engine, `cli.py` -> cli."""
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def own_files() -> list[Path]:
    return [path.relative_to(ROOT / "batchjob") for path in sources(ROOT / "batchjob")]


def package_of(relative: Path) -> str:
    return ".".join(["batchjob", *relative.parent.parts])


def imported_room(module: str) -> str:
    name = module.split(".")[1] if "." in module else "__init__"
    here = ROOT / "batchjob" / name
    return name if here.is_dir() or here.with_suffix(".py").is_file() else "__init__"


def test_every_room_has_its_arrows() -> None:
    assert {room_of(path) for path in own_files()} <= set(ARROWS), "a new room needs a line in ARROWS"


def test_arrows_never_point_up() -> None:
    wrong = []
    for path in own_files():
        room = room_of(path)
        for found in imports(ROOT / "batchjob" / path, package_of(path)):
            if found.module.split(".")[0] != "batchjob" or found.module == "batchjob.__version__":
                continue
            target = imported_room(found.module)
            if target != room and target not in ARROWS.get(room, set()):
                wrong.append(f"batchjob/{path}:{found.line} {room} must not import {target} ({found.module})")
    assert wrong == []


def test_third_party_packages_stay_in_their_rooms() -> None:
    wrong = []
    for path in own_files():
        room = room_of(path)
        for found in imports(ROOT / "batchjob" / path, package_of(path)):
            top = found.module.split(".")[0]
            if top in sys.stdlib_module_names or top in ("batchjob", "__future__"):
                continue
            allowed = room in THIRD_PARTY.get(top, set())
            if top == "torch" and str(path.with_suffix("")) in NO_TORCH_IN_ENGINE:
                allowed = False
            if not allowed:
                wrong.append(f"batchjob/{path}:{found.line} {room} must not import {top}")
    assert wrong == []


def test_kernels_know_torch_and_themselves_only() -> None:
    wrong = []
    for path in sources(ROOT / "kernels"):
        for found in imports(path, "batchjob_kernels"):
            top = found.module.split(".")[0]
            if top not in sys.stdlib_module_names and top not in ("torch", "triton", "batchjob_kernels"):
                wrong.append(f"{path.relative_to(ROOT)}:{found.line} must not import {top}")
    assert wrong == []


BLOCKER = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ImportError(f"blocked: {{name}}")
sys.meta_path.insert(0, Blocker())
"""


def run_python(program: str, *, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=cwd, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def modules_of(*rooms: str) -> list[str]:
    found = []
    for path in own_files():
        if room_of(path) in rooms:
            parts = ["batchjob", *path.with_suffix("").parts]
            found.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    assert found
    return found


def test_the_core_runs_on_the_standard_library_alone() -> None:
    blocked = {"torch", "numpy", "transformers", "pyarrow", "click", "tqdm", "jinja2", "tokenizers", "huggingface_hub"}
    names = modules_of("core", *PLAIN)
    run_python(BLOCKER.format(blocked=blocked) + "".join(f"import {name}\n" for name in names))


@pytest.mark.parametrize(
    "room", ["store", "io", "models", "prompts", "feeder", "job", "cli", "summary", "progress", "worker"]
)
def test_a_room_loads_without_torch(room: str) -> None:
    run_python(
        BLOCKER.format(blocked={"torch", "transformers"}) + "".join(f"import {name}\n" for name in modules_of(room))
    )


def test_the_supervisor_is_thin() -> None:
    """It lives as long as the job and shares the machine with it."""
    blocked = {"torch", "transformers", "pyarrow", "numpy", "tqdm", "jinja2", "tokenizers", "huggingface_hub"}
    names = modules_of("supervisor")
    run_python(BLOCKER.format(blocked=blocked) + "".join(f"import {name}\n" for name in names))


def test_the_engine_and_its_fake_runner_load_without_torch() -> None:
    names = sorted("batchjob." + name.replace("/", ".").removesuffix(".__init__") for name in NO_TORCH_IN_ENGINE)
    run_python(
        BLOCKER.format(blocked={"torch", "transformers", "numpy"}) + "".join(f"import {name}\n" for name in names)
    )


def test_the_package_itself_loads_nothing_heavy() -> None:
    heavy = {"torch", "transformers", "pyarrow", "numpy", "click", "tqdm", "huggingface_hub"}
    assert run_python(f"import batchjob, sys; print(sorted({heavy!r} & set(sys.modules)))") == "[]"


HELP = """
import sys
sys.argv = ["batchjob", *{arguments!r}]
from batchjob.cli import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
print(sorted({heavy!r} & set(sys.modules)), file=sys.stderr)
"""


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["run", "--help"], ["status", "--help"]])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    heavy = {"torch", "transformers", "pyarrow", "numpy", "tqdm", "huggingface_hub"}
    done = subprocess.run(
        [sys.executable, "-c", HELP.format(arguments=arguments, heavy=heavy)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stderr.strip() == "[]"


def test_help_answers_in_half_a_second() -> None:
    def seconds() -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "batchjob", "--help"], capture_output=True, timeout=60, check=True)
        return time.perf_counter() - start

    assert min(seconds() for _ in range(5)) < 0.5


def test_the_kernels_directory_shadows_no_package(tmp_path: Path) -> None:
    """Transformers imports the hub's kernel client as `kernels`; ours must not answer to that name."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    program = "import importlib.util; print(importlib.util.find_spec('kernels'))"
    assert str(ROOT) not in run_python(program, cwd=tmp_path)
    assert importlib.util.find_spec("batchjob_kernels") is not None


def test_transformers_loads_from_the_root_of_the_checkout() -> None:
    """There the namespace package `kernels` can be found; it must not be taken for the hub's client."""
    program = (
        "from transformers.utils.import_utils import is_kernels_available as available;"
        "import importlib.metadata as metadata;"
        "installed = any(d.metadata['Name'] == 'kernels' for d in metadata.distributions());"
        "print(available() == installed or installed)"
    )
    assert run_python(program, cwd=ROOT) == "True"
