"""What is installed, what it needs, and which names it offers."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import batchjob

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    return {normalise(name): version for name, version in pins.items()}


def normalise(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_package_on_disk_is_listed(project: dict[str, Any]) -> None:
    found = {"batchjob_kernels"}
    for path in (ROOT / "batchjob").rglob("*.py"):
        found.add(".".join(path.relative_to(ROOT).parent.parts))
    for path in (ROOT / "kernels" / "batchjob_kernels").rglob("*.py"):
        found.add(".".join(path.relative_to(ROOT / "kernels").parent.parts))
    assert sorted(project["tool"]["setuptools"]["packages"]) == sorted(found)


def test_every_package_is_a_regular_one(project: dict[str, Any]) -> None:
    """A forgotten __init__.py makes a namespace package, which others can add to."""
    where = project["tool"]["setuptools"]["package-dir"]
    for name in project["tool"]["setuptools"]["packages"]:
        top, _, rest = name.partition(".")
        assert (ROOT / where.get(top, top) / rest.replace(".", "/") / "__init__.py").is_file(), name


def test_only_the_two_packages_are_installed(tmp_path: Path) -> None:
    """Neither tests, data, jobs nor kernels can be imported from elsewhere."""
    names = ("tests", "data", "jobs", "kernels", "docs")
    program = f"import importlib.util as u; print([n for n in {names!r} if {str(ROOT)!r} in str(u.find_spec(n))])"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_version_is_one() -> None:
    assert batchjob.__version__ == importlib.metadata.version("batchjob")
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] in (batchjob.__version__, "Unreleased")


def test_the_public_names_are_these() -> None:
    errors = [
        name
        for name, value in vars(batchjob.errors).items()
        if isinstance(value, type) and issubclass(value, batchjob.BatchJobError)
    ]
    assert sorted(batchjob.__all__) == sorted([*errors, "JobSpec", "SamplingParams", "__version__", "run"])
    assert dir(batchjob) == batchjob.__all__


@pytest.mark.parametrize("name", batchjob.__all__)
def test_each_public_name_is_there(name: str) -> None:
    assert getattr(batchjob, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = batchjob.no_such_name


def test_the_tested_versions_are_within_the_ranges(project: dict[str, Any], constraints: dict[str, str]) -> None:
    wanted = list(project["project"]["dependencies"])
    for extra in project["project"]["optional-dependencies"].values():
        wanted += [line for line in extra if not line.startswith("batchjob[")]
    for line in wanted:
        requirement = Requirement(line)
        version = constraints.get(normalise(requirement.name))
        assert version is not None, f"{requirement.name} has no line in constraints.txt"
        assert requirement.specifier.contains(version), f"{line} leaves out the tested {version}"


def test_what_the_code_imports_is_a_dependency(project: dict[str, Any]) -> None:
    named = {normalise(Requirement(line).name) for line in project["project"]["dependencies"]}
    extras = {normalise(Requirement(line).name) for line in project["project"]["optional-dependencies"]["demo"]}
    own = {"batchjob", "batchjob_kernels", "__future__"}
    with_torch = {"triton"}  # comes with PyTorch's CUDA builds, and is asked for only where it is
    missing = set()
    for path in [*(ROOT / "batchjob").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]:
        for match in re.finditer(r"^\s*(?:from|import) ([A-Za-z_]\w*)", path.read_text(), re.MULTILINE):
            top = match[1]
            if top not in own | with_torch | sys.stdlib_module_names and normalise(top) not in named | extras:
                missing.add(f"{path.relative_to(ROOT)}: {top}")
    assert missing == set()
