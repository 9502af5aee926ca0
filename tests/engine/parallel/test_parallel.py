"""A model split over two processes gives the tokens of one, and no process outlives the runner."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from families import FAMILIES, save

from batchjob.engine import Engine, EngineConfig
from batchjob.engine.parallel import runner as parallel
from batchjob.engine.parallel.runner import ParallelRunner
from batchjob.engine.runner import TorchRunner
from batchjob.errors import EngineError, UnsupportedModelError
from batchjob.records import Completion, Request
from batchjob.sampling import SamplingParams

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="these split a model over processes on a CPU")

BLOCK_SIZE = 4
PER_BLOCK = 2 * 3 * 1 * 8 * 4 * BLOCK_SIZE  # of a rank: keys and values, layers, KV heads, head size, bytes, tokens


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class Letters:
    special_tokens = ()

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(32 + token) for token in ids)


def make_requests(number: int = 20) -> list[Request]:
    rng = random.Random(0)
    settings = [
        SamplingParams(max_tokens=9),
        SamplingParams(max_tokens=17, ignore_eos=True),
        SamplingParams(max_tokens=20, temperature=0.8, top_k=20, top_p=0.9),
        SamplingParams(max_tokens=20, temperature=1.3, repetition_penalty=1.2, presence_penalty=0.3),
        SamplingParams(max_tokens=20, temperature=1.0, stop_token_ids=(11, 40), min_tokens=5),
        SamplingParams(max_tokens=12, temperature=1.0, logit_bias=((7, 4.0), (9, -100.0))),
    ]
    requests = []
    for row in range(number):
        prompt = [rng.randrange(3, 96) for _ in range(rng.randint(1, 40 if row % 5 == 0 else 20))]
        requests.append(Request(row, 0, prompt, settings[row % len(settings)], stream=1000 + row))
    return requests


def config_of(**settings: Any) -> EngineConfig:
    return EngineConfig(
        **{
            "max_model_len": 64,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 24,
            "block_size": BLOCK_SIZE,
            "eos_token_ids": (2,),
            "num_threads": 1,
            **settings,
        }
    )


def completions(engine: Engine, requests: list[Request]) -> dict[int, Completion]:
    for request in requests:
        assert engine.add(request) is None
    done = {}
    while engine.has_unfinished():
        done.update({completion.row_index: completion for completion in engine.step()})
    return done


def alone(path: Path) -> dict[int, Completion]:
    config = config_of()
    return completions(Engine(TorchRunner(path, config), Letters(), config), make_requests())


def split(path: Path, **settings: Any) -> Engine:
    """With everything that makes a step differ from plain ones: a cache too small for all rows, steps started ahead."""
    config = config_of(tensor_parallel=2, async_scheduling=True, decode_steps_per_launch=3, **settings)
    return Engine(ParallelRunner(path, config), Letters(), config)


def children() -> set[int]:
    """The processes that this one has started and that have not ended."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid() and fields[0] != "Z":
            found.add(int(stat.parent.name))
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("models")
    return {name: save(directory / name, *FAMILIES[name]) for name in ("llama", "qwen3", "qwen3_moe")}


def test_rows_are_those_of_one_process(models: dict[str, Path]) -> None:
    before = children()
    engine = split(models["llama"], kv_cache_bytes=24 * PER_BLOCK)
    try:
        assert "LlamaForCausalLM in float32 on 2 processes" in engine.capacity.description
        assert engine.capacity.num_blocks == 23
        assert len(children() - before) == 1
        expected = alone(models["llama"])
        assert completions(engine, make_requests()) == expected
        assert engine.stats.num_preemptions > 0
        assert engine.stats.num_wasted > 0, "steps were started ahead"
        # And once more: the same slots and blocks, with prompts that are in the prefix cache.
        assert completions(engine, make_requests()) == expected
    finally:
        engine.close()
    engine.close()
    assert children() == before
    assert not torch.distributed.is_initialized()


def test_a_process_that_is_killed_is_an_error(models: dict[str, Path]) -> None:
    before = children()
    engine = split(models["qwen3"])
    [follower] = children() - before
    try:
        assert completions(engine, make_requests()) == alone(models["qwen3"])
        for request in make_requests():
            engine.add(request)
        engine.step()
        os.kill(follower, signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(EngineError, match="process 2 of 2 that the model is split over: ended by signal 9"):
            completions(engine, [])
        assert time.monotonic() - started < 5
    finally:
        engine.close()
    assert children() == before


def follower_with(change: str) -> tuple[str, ...]:
    """The command of a follower in which something is different."""
    names = "from batchjob.engine import memory, runner\nfrom batchjob.engine.parallel import follower, group"
    code = f"{names}\n{change}\nfollower.main()"
    return sys.executable, "-c", code


def test_a_process_that_ends_before_all_have_joined_is_an_error(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = children()
    change = "import os\ngroup.Group.__init__ = lambda *args: os._exit(7)"
    monkeypatch.setattr(parallel, "FOLLOWER", follower_with(change))
    with pytest.raises(EngineError, match="process 2 of 2 that the model is split over: ended by exit code 7"):
        ParallelRunner(models["llama"], config_of(tensor_parallel=2))
    assert children() == before
    assert not torch.distributed.is_initialized()


@pytest.mark.long
def test_an_error_of_another_process_ends_the_step(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory there is out of memory here, and no process tries again alone."""
    change = """
import torch
def fail(self, inputs):
    def forward(): raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
    memory.with_one_try(forward)()
runner.TorchRunner.follow = fail"""
    monkeypatch.setattr(parallel, "FOLLOWER", follower_with(change))
    engine = split(models["llama"])
    try:
        with pytest.raises(EngineError, match="process 2 of 2 that the model is split over: out of memory"):
            completions(engine, make_requests())
    finally:
        engine.close()


@pytest.mark.long
def test_no_process_outlives_the_first(models: dict[str, Path]) -> None:
    code = f"""
import sys, time
from pathlib import Path
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]!r}  # this file; `families`
import test_parallel
engine = test_parallel.split(Path({str(models["llama"])!r}))
print(*test_parallel.children(), flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        followers = [int(pid) for pid in first.stdout.readline().split()]
        assert len(followers) == 1
        first.kill()
        deadline = time.monotonic() + 1
        while any(is_alive(pid) for pid in followers):
            assert time.monotonic() < deadline
            time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.long
def test_a_job_on_the_command_line(tiny_llama: Path, tmp_path: Path) -> None:
    """The rows of a job with two processes are those of a job with one."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "the number {number} and"}}\n' for number in range(12)))
    outputs = []
    for size in (1, 2):
        out = tmp_path / f"out{size}"
        command = [
            sys.executable,
            "-m",
            "batchjob",
            "run",
            "--input",
            str(rows),
            "--model",
            str(tiny_llama),
            "--output",
            str(out),
        ]
        command += ["--device", "cpu", "--max-tokens", "12", "--temperature", "1", "--tensor-parallel", str(size)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        assert ("on 2 processes" in done.stdout + done.stderr) == (size == 2)
        tables = [pyarrow.parquet.read_table(part) for part in sorted((out / "data").glob("*.parquet"))]
        outputs.append([row["output"] for table in tables for row in table.to_pylist()])
    assert len(outputs[0]) == 12
    assert outputs[0] == outputs[1]


@pytest.mark.long
def test_mixture_of_experts(models: dict[str, Path]) -> None:
    engine = split(models["qwen3_moe"])
    try:
        assert completions(engine, make_requests()) == alone(models["qwen3_moe"])
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("family", "size", "message"),
    [
        ("llama", 4, "2 .num_key_value_heads.; --tensor-parallel works with 2$"),
        ("gpt2", 2, "no plan that splits gpt2 models"),
    ],
)
def test_what_cannot_be_split_is_refused_before_anything_starts(
    family: str, size: int, message: str, tmp_path: Path
) -> None:
    before = children()
    path = save(tmp_path / family, *FAMILIES[family])
    with pytest.raises(UnsupportedModelError, match=message):
        ParallelRunner(path, config_of(tensor_parallel=size))
    assert children() == before


def test_gpus_that_are_not_there_are_an_error(models: dict[str, Path]) -> None:
    with pytest.raises(EngineError, match="--tensor-parallel 2 from cuda:1 on needs 3 GPUs, and PyTorch sees 0"):
        ParallelRunner(models["llama"], config_of(tensor_parallel=2, device="cuda:1"))
