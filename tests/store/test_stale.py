"""A file server that loses track of files (ESTALE), and caches that show a directory as it was a while ago."""

from __future__ import annotations

import errno
import itertools
import os
from pathlib import Path
from typing import Any

import pytest

from batchjob.errors import FileServerError
from batchjob.store import Store
from batchjob.store.reread import reread


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchjob.store.reread.PAUSES", (0.0, 0.0, 0.0))


def test_a_read_is_made_again_until_it_works() -> None:
    answers = iter([errno.ESTALE, errno.ESTALE, None])

    def read() -> str:
        number = next(answers)
        if number is not None:
            raise OSError(number, os.strerror(number))
        return "content"

    assert reread(read) == "content"


@pytest.mark.parametrize(("number", "tries"), [(errno.ESTALE, 4), (errno.EIO, 1)])
def test_only_a_stale_handle_is_tried_again_and_not_for_ever(number: int, tries: int) -> None:
    calls = []

    def read() -> None:
        calls.append(1)
        raise OSError(number, os.strerror(number))

    with pytest.raises(OSError, match=os.strerror(number)):
        reread(read)
    assert len(calls) == tries


@pytest.mark.parametrize("operation", ["open_read", "listdir"])
def test_a_stale_handle_at_any_read_of_a_job_does_no_harm(kit: Any, tmp_path: Path, operation: str) -> None:
    plan = kit.make_plan(5, 3)
    for k in itertools.count():
        output = tmp_path / str(k) / "out"
        kit.Job().run(output, kit.make_plan(5, 3))
        for name in os.listdir(output / "data"):
            if k % 2:
                (output / "data" / name).unlink()
        fs = kit.FaultyFs(k, error=errno.ESTALE, only=[operation])
        stale_anyway = None
        try:
            kit.Job().run(output, plan, fs=fs)
        except FileServerError as error:
            stale_anyway = error  # a sweep of directories, which the next start makes
        if fs.count <= k:
            return
        if stale_anyway is not None:
            assert operation == "listdir"
            assert stale_anyway.exit_code == 75
            kit.Job().run(output, plan)
        kit.check_output(output, plan)


def test_a_server_that_stays_lost_is_exit_75(kit: Any, output: Path) -> None:
    plan = kit.make_plan(5, 3)
    kit.Job().run(output, plan)
    fs = kit.FaultyFs(0, error=errno.ESTALE, persistent=True, only=["open_read"])
    with pytest.raises(FileServerError) as caught:
        Store.open(output, fs=fs)
    assert caught.value.exit_code == 75
    assert "Run the same command again" in str(caught.value)


def test_logs_and_parts_that_another_client_cannot_see_yet_cost_time_not_rows(kit: Any, output: Path) -> None:
    """A process whose listings are those of an hour ago computes everything again, and its parts are dropped."""
    plan = kit.make_plan(9, 3)
    kit.Job().run(output, plan)
    before = {path.name: path.read_bytes() for path in (output / "data").iterdir()}

    class OldView(kit.FastFs):  # type: ignore[name-defined, misc]
        def listdir(self, path: Path) -> list[str]:
            return [] if path.name == "data" and not self.sees else super().listdir(path)

        def stat(self, path: Path) -> os.stat_result:
            if path.parent.name == "data" and not self.sees:
                raise FileNotFoundError(errno.ENOENT, "not in the cache", str(path))
            return super().stat(path)

        sees = False

    fs = OldView()
    store = Store.open(output, fs=fs)
    store.start_attempt({})
    for index in range(3):
        assert store.committed() == set(range(index))
        committed = kit.finish_chunk(store, index)
        assert not committed.won
    fs.sees = True
    store.close()
    assert {path.name: path.read_bytes() for path in (output / "data").iterdir()} == before
    kit.check_output(output, plan)
