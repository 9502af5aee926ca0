"""Loaded by every Python process of a program under test, whatever starts it: makes the fake engine slow (FAULTS_STEP,
seconds) and gives the attempt a known name (FAULTS_ATTEMPT), so that strace can be told its files beforehand."""

from __future__ import annotations

import importlib.machinery
import os
import sys
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any


def _slow_engine(module: ModuleType) -> None:
    seconds = float(os.environ.get("FAULTS_STEP", "0"))
    init = module.FakeRunner.__init__
    module.FakeRunner.__init__ = lambda self, *a, **k: init(self, *a, **{**k, "step_seconds": seconds})


def _known_attempt(module: ModuleType) -> None:
    if name := os.environ.get("FAULTS_ATTEMPT"):
        module.new_attempt_id = lambda: name


_PATCHES = {"batchjob.engine.fake": _slow_engine, "batchjob.store.attempts": _known_attempt}


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in _PATCHES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        assert spec.loader is not None
        run = spec.loader.exec_module

        def run_and_patch(module: ModuleType) -> None:
            run(module)
            _PATCHES[name](module)

        spec.loader.exec_module = run_and_patch  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())
