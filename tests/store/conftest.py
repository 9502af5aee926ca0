"""Gives the tests of the store their kit."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

_KIT = Path(__file__).with_name("kit.py")


def _load_kit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("store_kit", _KIT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["store_kit"] = module
    spec.loader.exec_module(module)
    return module


_LOADED = _load_kit()


@pytest.fixture(scope="session")
def kit() -> Any:
    return _LOADED


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out"
