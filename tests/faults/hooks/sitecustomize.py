"""Loaded by every Python process of a program under test, whatever starts it: makes the fake engine slow (FAULTS_STEP,
seconds), gives attempt and job known names (FAULTS_ATTEMPT), so that strace can be told its files beforehand, and makes
the tokeniser's process come down at words (FAULTS_TOKENIZER)."""

from __future__ import annotations

import ctypes
import importlib.machinery
import os
import signal
import sys
import time
from importlib.abc import MetaPathFinder
from types import ModuleType, SimpleNamespace
from typing import Any


def _slow_engine(module: ModuleType) -> None:
    seconds = float(os.environ.get("FAULTS_STEP", "0"))
    init = module.FakeRunner.__init__
    module.FakeRunner.__init__ = lambda self, *a, **k: init(self, *a, **{**k, "step_seconds": seconds})


def _known_attempt(module: ModuleType) -> None:
    if name := os.environ.get("FAULTS_ATTEMPT"):
        module.new_attempt_id = lambda: name


def _known_job(module: ModuleType) -> None:
    if "FAULTS_ATTEMPT" in os.environ:
        module.uuid = SimpleNamespace(uuid4=lambda: SimpleNamespace(hex="0" * 32))


class PanicException(BaseException):
    """Named as PyO3 names it."""


def _come_down(text: str) -> None:
    if "deadly" in text:
        os.kill(os.getpid(), signal.SIGKILL)
    if "leaves" in text:
        os._exit(3)
    if "segfault" in text:
        ctypes.string_at(0)
    if "panics" in text:
        raise PanicException("called `Option::unwrap()` on a `None` value")
    if "sleeps" in text:
        time.sleep(600)
    if "holds" in text:
        ctypes.PyDLL(None).sleep(600)  # native code that keeps the interpreter's lock


def _deadly_words(module: ModuleType) -> None:
    if "FAULTS_TOKENIZER" not in os.environ:
        return
    from batchjob.prompts.tokenizer import TokenizerPanic

    right = module.FakeTokenizer.encode

    def encode(self: Any, text: str, *, add_special_tokens: bool) -> Any:
        try:
            _come_down(text)
        except PanicException as error:
            raise TokenizerPanic(f"{error}") from None
        return right(self, text, add_special_tokens=add_special_tokens)

    module.FakeTokenizer.encode = encode


def _deadly_real_words(module: ModuleType) -> None:
    if "FAULTS_TOKENIZER" not in os.environ:
        return
    right = module.HFTokenizer._call

    def call(self: Any, texts: Any, special: bool) -> Any:
        for text in texts:
            _come_down(text)
        return right(self, texts, special)

    module.HFTokenizer._call = call
    module.HFTokenizer._fast_backend = lambda self: None


_PATCHES = {
    "batchjob.engine.fake": _slow_engine,
    "batchjob.store.attempts": _known_attempt,
    "batchjob.store.manifest": _known_job,
    "batchjob.prompts.fake_tokenizer": _deadly_words,
    "batchjob.prompts.hf_tokenizer": _deadly_real_words,
}


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
