"""Create-if-absent on file systems that have hard links, or only a rename, or only directories."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from batchjob.errors import OutputCreateError, StorageError
from batchjob.store import FsOps, Store
from batchjob.store.paths import Layout
from batchjob.store.publish import CLAIM, LINK, RENAME_NOREPLACE, Claim, probe, publish


class Poor(FsOps):
    """A file system that lacks operations (they raise), or has them in a way that replaces what is there."""

    def __init__(self, *missing: str, number: int = errno.EPERM, replacing: bool = False) -> None:
        self._missing = missing
        self._number = number
        self._replacing = replacing

    def _lack(self, name: str, source: Path, target: Path) -> bool:
        if name not in self._missing:
            return False
        if not self._replacing:
            raise OSError(self._number, os.strerror(self._number), str(source))
        os.replace(source, target)
        return True

    def link(self, source: Path, target: Path) -> None:
        if not self._lack("link", source, target):
            super().link(source, target)

    def rename_noreplace(self, source: Path, target: Path) -> None:
        if not self._lack("rename_noreplace", source, target):
            super().rename_noreplace(source, target)


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    return tmp_path / "a", tmp_path / "b"


@pytest.mark.parametrize("replacing", [False, True])
@pytest.mark.parametrize(
    ("missing", "method"),
    [((), LINK), (("link",), RENAME_NOREPLACE), (("link", "rename_noreplace"), CLAIM), (("rename_noreplace",), LINK)],
)
def test_the_probe_takes_the_first_method_that_keeps_what_is_there(
    places: tuple[Path, Path], missing: tuple[str, ...], method: str, replacing: bool
) -> None:
    assert probe(Poor(*missing, replacing=replacing), *places) == method
    assert os.listdir(places[0]) == os.listdir(places[1]) == []


def test_a_file_system_without_any_of_them_is_refused(places: tuple[Path, Path]) -> None:
    class None_(Poor):
        def rename(self, source: Path, target: Path) -> None:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    with pytest.raises(OutputCreateError, match=r"link: .*rename_noreplace: .*claim: Invalid cross-device link"):
        probe(None_("link", "rename_noreplace"), *places)


def test_other_errors_of_the_probe_are_not_taken_for_a_missing_operation(places: tuple[Path, Path]) -> None:
    with pytest.raises(OSError, match="Input/output error"):
        probe(Poor("link", number=errno.EIO), *places)


@pytest.mark.parametrize("missing", [(), ("link",), ("link", "rename_noreplace")])
def test_a_whole_job_on_a_poor_file_system(kit: Any, output: Path, missing: tuple[str, ...]) -> None:
    plan = kit.make_plan(7, 3)
    store = kit.Job().run(output, plan, fs=Poor(*missing))
    assert store.manifest.link_method == (LINK, RENAME_NOREPLACE, CLAIM)[len(missing)]
    kit.check_output(output, plan)
    assert os.listdir(Layout(output).claims) == []


def put(fs: FsOps, path: Path, text: bytes, target: Path, **options: Any) -> bool:
    fs.write_file(path, text)
    claims = target.parent / "claims"
    if not claims.exists():
        fs.mkdir(claims)
    values = {"claims": claims, "attempt": path.name, "is_dead": lambda _: False, "patience": 0.0}
    return publish(fs, options.pop("method"), path, target, **{**values, **options})


@pytest.mark.parametrize("method", [LINK, RENAME_NOREPLACE, CLAIM])
def test_the_second_of_two_writers_changes_nothing(tmp_path: Path, method: str) -> None:
    fs, target = FsOps(), tmp_path / "part-0.parquet"
    assert put(fs, tmp_path / "one", b"1", target, method=method)
    assert not put(fs, tmp_path / "two", b"2", target, method=method)
    assert target.read_bytes() == b"1"
    assert os.listdir(tmp_path / "claims") == []


def test_a_claim_of_a_living_process_is_waited_for_then_reported(tmp_path: Path) -> None:
    fs, target = FsOps(), tmp_path / "part-0.parquet"
    (tmp_path / "claims").mkdir()
    assert Claim(fs, tmp_path / "claims", target.name, "other").acquire(target, is_dead=lambda _: False, patience=0)
    with pytest.raises(StorageError, match="held by other, which has not published part-0"):
        put(fs, tmp_path / "mine", b"1", target, method=CLAIM)
    assert os.listdir(tmp_path / "claims") == ["part-0"]
    # It is passed over once its holder is known to be dead, and never by taking a newer claim.
    assert put(fs, tmp_path / "mine2", b"2", target, method=CLAIM, is_dead=lambda attempt: attempt == "other")
    assert target.read_bytes() == b"2"
    assert os.listdir(tmp_path / "claims") == []


def test_a_part_that_appears_behind_a_claim_ends_the_wait(tmp_path: Path) -> None:
    fs, target = FsOps(), tmp_path / "part-0.parquet"
    (tmp_path / "claims").mkdir()
    Claim(fs, tmp_path / "claims", target.name, "other").acquire(target, is_dead=lambda _: False, patience=0)
    target.write_bytes(b"1")
    assert not put(fs, tmp_path / "mine", b"2", target, method=CLAIM, patience=60)
    assert target.read_bytes() == b"1"


def test_the_method_in_job_json_holds_for_all_later_runs(kit: Any, output: Path) -> None:
    plan = kit.make_plan(3, 3)
    Store.create(output, kit.make_manifest(plan), plan, fs=Poor("link"))
    used: list[str] = []
    fs = kit.FaultyFs(before=lambda name, *_: used.append(name))
    kit.Job().run(output, plan, fs=fs)
    assert "rename_noreplace" in used
    assert "link" not in used
