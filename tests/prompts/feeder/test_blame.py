"""Which rows are blamed for the end of the tokeniser's process: those that did it, and no other."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchjob.errors import FeederError
from batchjob.prompts.feeder import Feeder, FeederConfig, process
from batchjob.prompts.feeder.blame import MAX_DOUBTFUL, MAX_FRUITLESS, MAX_POISONED, Blame
from batchjob.records import Prompt

ConfigOf = Callable[..., FeederConfig]
Drain = Callable[..., list[Prompt]]
WriteJsonl = Callable[[Path, Iterable[Any]], Path]

CHILD = """
import os, signal, sys, time
from batchjob.prompts.fake_tokenizer import FakeTokenizer
right = FakeTokenizer.encode
def encode(self, text, *, add_special_tokens):
    {patch}
    return right(self, text, add_special_tokens=add_special_tokens)
FakeTokenizer.encode = encode
from batchjob.prompts.feeder.child import main
main()
"""


def work_off(num_rows: int, deadly: set[int], batch: int) -> tuple[Blame, int]:
    """What a feeder and its processes do with a Blame; and the number of deaths."""
    blame, done, deaths = Blame(), set[int](), 0
    while True:
        rest = [row for row in range(num_rows) if row not in done]
        while rest:
            if rest[0] in blame.alone:
                rows, rest = rest[:1], rest[1:]
            else:
                size = next((i for i, row in enumerate(rest[:batch]) if row in blame.alone), batch)
                rows, rest = rest[:size], rest[size:]
            if rows[0] not in blame.poisoned and deadly.intersection(rows):
                deaths += 1
                blame.accuse(rows, "died")
                break
            blame.built(rows)
            done.update(rows)
        else:
            return blame, deaths
        if blame.gave_up:
            return blame, deaths


@given(num_rows=st.integers(1, 300), batch=st.integers(1, 64), seed=st.randoms(use_true_random=False))
def test_three_deaths_find_a_row(num_rows: int, batch: int, seed: Any) -> None:
    deadly = set(seed.sample(range(num_rows), min(num_rows, seed.randrange(MAX_DOUBTFUL + 1))))
    blame, deaths = work_off(num_rows, deadly, batch)
    assert blame.gave_up is None
    assert set(blame.poisoned) == deadly
    assert deaths <= 3 * len(deadly)


def test_a_tokeniser_that_comes_down_at_every_row_is_given_up() -> None:
    blame, deaths = work_off(500, set(range(500)), 50)
    assert "in a row, each alone" in (blame.gave_up or "")
    assert deaths == 1 + 2 * (MAX_DOUBTFUL + 1)


def test_so_is_one_that_comes_down_at_every_second_row() -> None:
    blame, _ = work_off(1000, set(range(0, 1000, 2)), 50)
    assert "more than bad rows" in (blame.gave_up or "")
    assert len(blame.poisoned) == MAX_POISONED + 1


def test_so_is_one_that_never_gets_as_far_as_a_row() -> None:
    blame = Blame()
    pauses = []
    for _ in range(MAX_FRUITLESS):
        assert blame.gave_up is None
        blame.accuse([], "died")
        pauses.append(blame.pause)
    assert blame.gave_up
    assert pauses == sorted(pauses)
    assert pauses[0] == 0


def test_kills_from_outside_blame_nobody(
    tmp_path: Path, write_jsonl: WriteJsonl, config_of: ConfigOf, drain: Drain
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": f"row {i}"} for i in range(30_000)])
    config = config_of(path, chunk_rows=4000)
    said: list[str] = []
    with closing(Feeder(config, said.append)) as feeder:
        expected = drain(feeder, config)
    with closing(Feeder(config, said.append)) as feeder:
        for chunk in config.plan.chunks:
            feeder.feed(chunk)
        found: list[Prompt] = []
        kills, num_last = 0, 0
        while num_last < len(config.plan.chunks):
            for batch in feeder.poll(30):
                found += batch.prompts
                num_last += batch.last
            if len(found) > 5000 * kills and kills < 4:
                os.kill(feeder.pid, signal.SIGKILL)
                kills += 1
    assert found == expected
    assert kills == 4
    assert len(said) == 4
    assert all("was killed by SIGKILL" in line for line in said)


@pytest.mark.parametrize(
    ("patch", "how"),
    [
        ("if 'bad' in text: os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL"),
        ("if 'bad' in text: os._exit(7)", "ended with exit code 7"),
        ("if 'bad' in text: time.sleep(600)", "hung"),
    ],
)
def test_a_row_that_does_it_alone_twice_becomes_an_error(
    tmp_path: Path,
    write_jsonl: WriteJsonl,
    config_of: ConfigOf,
    drain: Drain,
    monkeypatch: pytest.MonkeyPatch,
    patch: str,
    how: str,
) -> None:
    rows: list[Any] = [{"prompt": f"row {i}", "params": {"n": 2}} for i in range(600)]
    bad_rows = [300] if how == "hung" else [0, 300, 599]
    for bad in bad_rows:
        rows[bad]["prompt"] = f"bad {bad}"
    config = config_of(write_jsonl(tmp_path / "a.jsonl", rows), chunk_rows=500)
    config = replace(config, row_seconds=0.5)
    monkeypatch.setattr(process, "CHILD", (sys.executable, "-c", CHILD.format(patch=patch)))
    said: list[str] = []
    with closing(Feeder(config, said.append)) as feeder:
        prompts = drain(feeder, config)
    assert [prompt.row_index for prompt in prompts] == list(range(600))
    failed = [prompt for prompt in prompts if prompt.error is not None]
    assert [prompt.row_index for prompt in failed] == bad_rows
    for prompt in failed:
        assert prompt.error is not None
        assert prompt.error.type == "tokenizer_crash"
        assert how in prompt.error.message
        assert f"a.jsonl:{prompt.row_index + 1}" in prompt.error.message
    assert all(prompt.params is not None and prompt.params.n == 2 for prompt in prompts)
    assert len(said) == 3 * len(bad_rows), said


def test_a_process_that_does_not_start_is_given_up(
    tmp_path: Path, write_jsonl: WriteJsonl, config_of: ConfigOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x"}]))
    monkeypatch.setattr(process, "CHILD", (sys.executable, "-c", "import os; os.abort()"))
    monkeypatch.setattr(process, "_MAX_PAUSE", 0.01)
    with closing(Feeder(config)) as feeder:
        feeder.feed(config.plan.chunks[0])
        with pytest.raises(FeederError, match=r"was killed by SIGABRT while it read .*a\.jsonl \(rows 0 to 0\)"):
            wait(feeder, 30)


def test_a_tokeniser_that_is_never_loaded_hangs(
    tmp_path: Path, write_jsonl: WriteJsonl, config_of: ConfigOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(config_of(write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x"}])), load_seconds=0.05)
    monkeypatch.setattr(process, "CHILD", (sys.executable, "-c", "import time; time.sleep(600)"))
    monkeypatch.setattr(process, "_MAX_PAUSE", 0.01)
    with closing(Feeder(config)) as feeder, pytest.raises(FeederError, match="hung: 0 s without a word about loading"):
        wait(feeder, 30)


def wait(feeder: Feeder, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        feeder.poll(0.1)


def test_rows_that_take_long_one_after_the_other_are_no_hang(
    tmp_path: Path, write_jsonl: WriteJsonl, config_of: ConfigOf, drain: Drain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row's template takes its time; there are signs of life in between."""
    slow = CHILD.format(patch="pass").replace(
        "from batchjob.prompts.feeder.child",
        "import time\nFakeTokenizer.render_chat = lambda self, *a, **k: time.sleep(0.3) or 'x'\n"
        "from batchjob.prompts.feeder import child\nchild._BEAT_SECONDS = 0.1\nfrom batchjob.prompts.feeder.child",
    )
    rows = [{"prompt": f"row {i}"} for i in range(6)]
    config = replace(config_of(write_jsonl(tmp_path / "a.jsonl", rows), chat=True), row_seconds=1.0)
    monkeypatch.setattr(process, "CHILD", (sys.executable, "-c", slow))
    said: list[str] = []
    with closing(Feeder(config, said.append)) as feeder:
        assert all(prompt.error is None for prompt in drain(feeder, config))
    assert said == []


def test_a_pipe_that_cannot_be_read_and_a_process_that_cannot_be_made_are_overcome(
    tmp_path: Path, write_jsonl: WriteJsonl, config_of: ConfigOf, drain: Drain, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(write_jsonl(tmp_path / "a.jsonl", [{"prompt": f"row {i}"} for i in range(600)]))
    receive, popen = process._Child.receive, process.child_process.spawn
    failures: list[OSError] = [OSError(5, "Input/output error"), OSError(11, "Resource temporarily unavailable")]

    def receive_late(self: Any, seconds: float | None) -> object:
        if len(failures) == 2:
            raise failures.pop()
        return receive(self, seconds)

    def start_late(*arguments: Any, **more: Any) -> Any:
        if len(failures) == 1:
            raise failures.pop()
        return popen(*arguments, **more)

    said: list[str] = []
    with closing(Feeder(config, said.append)) as feeder:
        monkeypatch.setattr(process._Child, "receive", receive_late)
        monkeypatch.setattr(process.child_process, "spawn", start_late)
        os.kill(feeder.pid, signal.SIGKILL)
        prompts = drain(feeder, config)
    assert [prompt.row_index for prompt in prompts] == list(range(600))
    assert all(prompt.error is None for prompt in prompts)
    assert failures == []
    assert any("cannot be started" in line for line in said)


def test_whatever_fails_in_the_thread_that_listens_is_raised(
    tmp_path: Path, write_jsonl: WriteJsonl, config_of: ConfigOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x"}]))
    monkeypatch.setattr(Feeder, "_arrived", lambda self, message: 1 / 0)
    with closing(Feeder(config)) as feeder:
        feeder.feed(config.plan.chunks[0])
        with pytest.raises(FeederError, match="ZeroDivisionError"):
            wait(feeder, 30)
