"""The import arrows. A room that starts to import what it must not know fails here, with the line named.

cli -> {supervisor, launch} -> job -> {report, engine, store, prompts -> inputs} -> {models, slurm, tasks -> core}
Everything -> the words.
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
# The words of the house: files at the top of the package that every room may use.
WORDS = {"errors", "sampling", "spec", "records", "plan", "json_values", "notes", "child_process", "cgroup"}

# Room -> rooms that it may import beside the words. A room is a folder of batchjob/, or a file at its top.
ARROWS: dict[str, set[str]] = {
    "core": set(),
    "models": set(),
    "slurm": set(),
    "tasks": {"core"},
    "store": set(),
    "inputs": set(),
    "prompts": {"inputs", "models"},
    "engine": {"core", "models", "tasks"},
    "report": {"slurm"},
    "job": {"core", "engine", "inputs", "models", "prompts", "report", "slurm", "store"},
    "supervisor": {"job", "report", "slurm"},
    "launch": {"job", "models", "slurm", "store"},
    "bench": {"core", "engine", "models"},
    "cli": {"job", "launch", "report", "store", "supervisor"},
    "__main__": {"cli"},
    "__init__": {"job"},
}
# Among the words themselves, and inside the two rooms with floors of their own.
WORD_ARROWS: dict[str, set[str]] = {
    "errors": set(),
    "json_values": set(),
    "notes": set(),
    "child_process": set(),
    "cgroup": set(),
    "sampling": {"errors"},
    "plan": {"errors"},
    "spec": {"errors", "sampling"},
    "records": {"errors", "sampling", "spec"},
}
ENGINE_ARROWS: dict[str, set[str]] = {
    "config": set(),
    "openmp": set(),
    "fake": {"config"},
    "engine": {"config"},
    "kv_cache": set(),
    "model": {"config", "kv_cache"},
    "memory": {"config", "kv_cache", "model"},
    "sampling": set(),
    "invariant": {"kv_cache", "model"},
    "steps": {"kv_cache", "model"},
    "runner": {"config", "invariant", "kv_cache", "memory", "model", "sampling", "steps"},
    "parallel": {"config", "model", "openmp", "runner", "steps"},
    "factory": {"config", "engine", "fake", "openmp", "parallel", "runner"},
    "__init__": {"config", "engine", "factory", "fake"},
}
JOB_ARROWS: dict[str, set[str]] = {
    "__init__": set(),
    "chunk_source": set(),
    "devices": set(),
    "disk_space": set(),
    "extend": set(),
    "row_writer": set(),
    "settings": {"devices"},
    "time_limit": set(),
    "stop": {"time_limit"},
    "observer": {"stop"},
    "open": {"extend", "settings"},
    "header": {"open", "settings"},
    "isolation": {"chunk_source", "observer"},
    "intake": {"chunk_source", "isolation", "row_writer"},
    "loop": {"chunk_source", "intake", "row_writer", "time_limit"},
    "validate": {"open", "settings", "stop"},
    "run": {"chunk_source", "devices", "disk_space", "header", "loop", "observer", "open", "stop"},
}
INNER = {"engine": ENGINE_ARROWS, "job": JOB_ARROWS}

# Third-party package -> who may import it. Files are given as paths under batchjob/ without the ending.
NO_TORCH_IN_ENGINE = {"engine/__init__", "engine/config", "engine/engine", "engine/fake"}
THIRD_PARTY: dict[str, set[str]] = {
    "click": {"cli"},
    "pyarrow": {"inputs", "store", "json_values", "bench"},
    "zstandard": {"inputs"},
    "torch": {"engine", "bench"},
    "transformers": {"engine", "prompts", "bench"},
    "tokenizers": {"prompts"},
    "jinja2": {"prompts"},
    "huggingface_hub": {"models"},
    "safetensors": {"engine"},
    "gguf": {"engine"},
    "batchjob_kernels": {"engine", "bench"},
    "tqdm": {"report"},
    "numpy": {"engine", "inputs", "bench"},
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


def room_of(relative: Path, inside: str = "") -> str:
    """`engine/model/load.py` -> engine, or model inside of engine; `cli.py` -> cli."""
    parts = relative.parts[1:] if inside else relative.parts
    return parts[0] if len(parts) > 1 else relative.stem


def own_files() -> list[Path]:
    return [path.relative_to(ROOT / "batchjob") for path in sources(ROOT / "batchjob")]


def package_of(relative: Path) -> str:
    return ".".join(["batchjob", *relative.parent.parts])


def file_of(module: str) -> Path | None:
    """The file under batchjob/ that a dotted name is in; None: not ours, or the version alone."""
    parts = module.split(".")
    if parts[0] != "batchjob" or module == "batchjob.__version__":
        return None
    for n in range(len(parts), 0, -1):
        here = ROOT.joinpath(*parts[:n])
        for file in (here.with_suffix(".py"), here / "__init__.py"):
            if file.is_file():
                return file.relative_to(ROOT / "batchjob")
    return None


class Arrow(NamedTuple):
    at: str  # file:line
    source: Path
    target: Path


def arrows() -> list[Arrow]:
    found = []
    for path in own_files():
        for one in imports(ROOT / "batchjob" / path, package_of(path)):
            if (target := file_of(one.module)) is not None and target != path:
                found.append(Arrow(f"batchjob/{path}:{one.line}", path, target))
    return found


def test_every_room_has_its_arrows() -> None:
    assert {room_of(path) for path in own_files()} == ARROWS.keys() | WORDS, "a new room needs a line in ARROWS"
    for inside, allowed in INNER.items():
        rooms = {room_of(path, inside) for path in own_files() if path.parts[0] == inside}
        assert rooms == allowed.keys(), f"a new room inside {inside} needs a line"


def test_arrows_never_point_up() -> None:
    wrong = []
    for at, source, target in arrows():
        room, other = room_of(source), room_of(target)
        allowed = WORD_ARROWS[room] if room in WORDS else ARROWS[room] | WORDS
        if other != room and other not in allowed:
            wrong.append(f"{at} {room} must not import {other} ({target})")
    assert wrong == []


@pytest.mark.parametrize("inside", sorted(INNER))
def test_arrows_inside_a_room(inside: str) -> None:
    wrong = []
    for at, source, target in arrows():
        if source.parts[0] == target.parts[0] == inside:
            room, other = room_of(source, inside), room_of(target, inside)
            if other not in INNER[inside][room] | {room, "__init__"}:
                wrong.append(f"{at} {room} must not import {other} ({target})")
    assert wrong == []


@pytest.mark.parametrize("table", [ARROWS, ENGINE_ARROWS, JOB_ARROWS], ids=["rooms", "engine", "job"])
def test_no_allowed_arrow_is_unused(table: dict[str, set[str]]) -> None:
    """What is allowed and not used would let a new import in unseen."""
    inside = next((name for name, inner in INNER.items() if inner is table), "")
    used = {
        (room_of(source, inside), room_of(target, inside))
        for _, source, target in arrows()
        if not inside or source.parts[0] == target.parts[0] == inside
    }
    assert {(room, other) for room, others in table.items() for other in others} - used == set()


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
    names = modules_of("core", "tasks", *WORDS - {"json_values"})
    run_python(BLOCKER.format(blocked=blocked) + "".join(f"import {name}\n" for name in names))


@pytest.mark.parametrize(
    "room", ["store", "inputs", "models", "prompts", "job", "launch", "cli", "report", "supervisor"]
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
