"""The command for a real GPU, rehearsed without one: its parts, its budget, its bound."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchjob.bench.gpu_bound import step_work, workload_bound
from batchjob.bench.gpu_check import Check, main
from batchjob.bench.gpu_parts import Part, parts_for
from batchjob.bench.gpu_report import headline, table
from batchjob.bench.gpu_report import main as print_report
from batchjob.bench.gpu_shapes import SHAPES
from batchjob.bench.limits import Limits
from batchjob.bench.workload import length_rows, published_rows


def test_the_published_rows_are_those_of_the_others() -> None:
    rows = published_rows()
    assert len(rows) == 256
    assert sum(len(row.token_ids) for row in rows) == 142_827
    assert sum(row.max_tokens for row in rows) == 133_966  # the number that nano-vllm's page gives
    assert len(rows[0].token_ids) >= 100
    assert max(max(row.token_ids) for row in rows) <= 10_000


def test_the_length_mix_is_that_of_the_file(data_dir: Path) -> None:
    rows = length_rows(data_dir / "azure_lengths_200.csv")
    assert len(rows) == 200
    assert sum(len(row.token_ids) for row in rows) == 286_979
    assert sum(row.max_tokens for row in rows) == 32_391


def test_the_shapes_are_those_of_the_models() -> None:
    def weights(name: str) -> int:
        shape = SHAPES[name]
        return shape.linear_weights + shape.head_weights * (1 if shape.tied else 2)

    # As published, less the norms.
    assert weights("Qwen3-0.6B") == 596_049_920 - 65_536
    assert weights("Qwen3-8B") == 8_190_735_360 - 308_224
    assert weights("Llama-3.1-8B") == 8_030_261_248 - 266_240


@pytest.mark.parametrize("name", ["Qwen3-0.6B", "Llama-3.1-8B"])
def test_a_model_has_the_weights_that_its_shape_says(name: str) -> None:
    torch = pytest.importorskip("torch")
    from batchjob.bench.gpu_shapes import build

    shape = SHAPES[name].tiny()
    module = build(shape, device=torch.device("cpu"), dtype=torch.float32)
    matrices = sum(weight.numel() for weight in module.parameters() if weight.dim() > 1)
    assert matrices == shape.linear_weights + shape.head_weights * (1 if shape.tied else 2)


def test_the_bound_of_one_row_can_be_worked_out_by_hand() -> None:
    shape, limits = SHAPES["Qwen3-0.6B"], Limits(flops=1e30, bytes_per_second=1e12)
    bound = workload_bound(shape, [(10, 3)], limits, max_num_seqs=4, max_num_batched_tokens=100)
    # The prompt makes the first token; then two more steps. Each reads the weights, all that is cached, and writes.
    weights = 2 * (shape.linear_weights + shape.head_weights)
    cached = 2 * shape.kv_numbers * (10 + 10 + 11 + 1 + 12 + 1)
    assert bound.num_steps == 3
    assert bound.seconds == pytest.approx((3 * weights + cached) / 1e12)
    assert bound.output_rate == pytest.approx(3 / bound.seconds)


def test_the_bound_counts_products_where_they_take_longer() -> None:
    shape, limits = SHAPES["Qwen3-0.6B"], Limits(flops=1e12, bytes_per_second=1e30)
    bound = workload_bound(shape, [(8, 1), (4, 1)], limits, max_num_seqs=4, max_num_batched_tokens=5)
    assert bound.num_steps == 3  # 12 tokens of prompts, 5 at a time
    pairs = 8 * 9 // 2 + 4 * 5 // 2
    attention = 4 * shape.num_layers * shape.num_heads * shape.head_dim * pairs
    flops = 2 * (12 * shape.linear_weights + 2 * shape.head_weights) + attention
    assert bound.seconds == bound.compute_seconds == pytest.approx(flops / 1e12)


def test_fewer_sequences_at_once_take_longer() -> None:
    shape, limits = SHAPES["Qwen3-8B"], Limits(7e14, 4e12)
    lengths = [(50, 20)] * 8
    seconds = [
        workload_bound(shape, lengths, limits, max_num_seqs=count, max_num_batched_tokens=1024).seconds
        for count in (8, 4, 1)
    ]
    assert seconds == sorted(seconds)
    assert seconds[2] > 7 * seconds[0]


def test_the_bound_of_the_published_rows_is_what_the_arithmetic_of_the_devices_gives() -> None:
    """With 4.2 TB/s and 700 TFLOP/s."""
    lengths = [(len(row.token_ids), row.max_tokens) for row in published_rows()]
    rates = {
        name: workload_bound(
            SHAPES[name], lengths, Limits(7e14, 4.2e12), max_num_seqs=256, max_num_batched_tokens=8192
        ).output_rate
        for name in ("Qwen3-0.6B", "Qwen3-8B")
    }
    assert rates == {"Qwen3-0.6B": pytest.approx(35_000, rel=0.05), "Qwen3-8B": pytest.approx(12_500, rel=0.05)}


def test_fp8_keys_and_values_are_half_the_bytes() -> None:
    shape = SHAPES["Qwen3-8B"]
    _, wide = step_work(shape, tokens=1, sampled=1, pairs=1000, read=1000)
    _, narrow = step_work(shape, tokens=1, sampled=1, pairs=1000, read=1000, kv_bytes=1)
    assert wide - narrow == shape.kv_numbers * 1001


def test_what_matters_most_comes_first() -> None:
    names = [part.name for part in parts_for(list(SHAPES), {}, tiny=False, on_cpu=False)]
    order = ["smoke", "best/Qwen3-0.6B", "best/Qwen3-8B", "best/Llama-3.1-8B", "generate_batch/Qwen3-0.6B"]
    assert names[:5] == order
    assert names.index("kernel tests") < names.index("Qwen3-0.6B, graphs off")
    assert len(set(names)) == len(names)
    factors = {name.partition(", ")[2] for name in names if name.startswith("Qwen3-0.6B, ")}
    assert {"graphs off", "async off", "4 steps per launch", "8 steps per launch", "fuse off", "fp8 KV"} < factors
    assert {"flash", "gather", "64 sequences"} < factors
    assert "1 step per launch" not in factors  # as in the best configuration


def test_a_factor_that_the_best_configuration_has_is_not_run_twice() -> None:
    parts = parts_for(["Qwen3-0.6B"], {"decode_steps_per_launch": 4}, tiny=False, on_cpu=False)
    factors = {part.name.partition(", ")[2]: part.settings for part in parts if part.name.startswith("Qwen3-0.6B, ")}
    assert "4 steps per launch" not in factors
    assert factors["1 step per launch"] == {"decode_steps_per_launch": 1}
    assert factors["fuse off"] == {"decode_steps_per_launch": 4, "fuse": False}


@pytest.fixture
def engine_task(tmp_path: Path) -> Any:
    """`engine_task(seconds, **settings)`: a task on the CPU with tiny models, and its report."""
    from batchjob.bench.gpu_task import Report, Task

    def make(seconds: float, **settings: Any) -> tuple[Task, Report]:
        path = tmp_path / "part.json"
        task = Task(
            function="",
            deadline=time.monotonic() + seconds,
            result_path=str(path),
            log_path="",
            device="cpu",
            tiny=True,
            limits=Limits(1e9, 1e9),
            settings=settings,
            options={"shape": "Qwen3-0.6B"},
        )
        return task, Report(path, task.deadline)

    return make


def test_a_workload_without_enough_time_is_cut_off_and_says_so(engine_task: Any) -> None:
    pytest.importorskip("torch")
    from batchjob.bench import gpu_engine
    from batchjob.bench.workload import NoText, Row
    from batchjob.engine import Engine
    from batchjob.engine.runner import TorchRunner

    task, report = engine_task(1000.0, async_scheduling=True, num_threads=1)
    shape = gpu_engine.shape_of(task)
    rows = [Row([5 + i, 6, 7], 1500) for i in range(4)]
    config = gpu_engine.make_config(task, rows)
    engine = Engine(TorchRunner(lambda: gpu_engine.model_of(task, shape), config), NoText(), config)
    report.deadline = time.monotonic() + 1.8
    result = gpu_engine.run_rows(engine, rows, task, report, shape)
    assert not result["whole"]
    assert "cut off" in result["note"]
    assert "fraction_of_bound" not in result
    assert 0 < result["output_tokens"] < 6000
    assert not engine.has_unfinished()
    report.deadline = time.monotonic() + 1000
    rows = gpu_engine.workload("published", tiny=True)
    result = gpu_engine.run_rows(engine, rows, task, report, shape)  # what was cut off does not get in its way
    assert result["whole"]
    assert result["output_tokens"] == sum(row.max_tokens for row in rows)
    assert result["fraction_of_bound"] == pytest.approx(result["bound_seconds"] / result["seconds"])


def test_a_backend_that_refuses_is_a_finding_and_no_failure(engine_task: Any) -> None:
    pytest.importorskip("torch")
    from batchjob.bench import gpu_engine

    task, report = engine_task(1000.0, attention_backend="flash", block_size=256)
    gpu_engine.measure(task, report)
    assert "CUDA" in report.values["engine"]
    assert "published" not in report.values


def test_kernels_get_their_kind_by_name() -> None:
    pytest.importorskip("torch")
    from batchjob.bench.gpu_profile import kind_of

    assert kind_of("attention_kernel") == kind_of("flash_fwd_splitkv_kernel") == "attention"
    assert kind_of("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT") == kind_of("cutlass::Kernel2<sm80_gemm>") == "linear"
    assert kind_of("groups_kernel") == kind_of("draw_kernel") == "sampling"
    assert kind_of("rms_norm_kernel") == kind_of("rotary_write_kernel") == "norms, rotary, activation"
    assert kind_of("Memcpy HtoD (Pinned -> Device)") == "copies"
    assert kind_of("void at::native::index_kernel") == "other"


def test_outcomes_of_tests_are_counted_also_where_they_were_cut_off() -> None:
    from batchjob.bench.gpu_tests import _summary

    whole = "tests/a.py::b PASSED\n== short test summary info ==\n=== 2 failed, 3 passed, 1 error in 4.5s ===\n"
    part = "tests/a.py::b[1] PASSED\ntests/a.py::b[2] FAILED\ntests/a.py::b[3] SKIPPED (no)\ntests/a.py::b[4] "
    assert _summary([whole, part]) == {"failed": 3, "passed": 4, "error": 1, "skipped": 1}


# -- parts that go wrong


class _Arguments:
    def __init__(self, path: Path, seconds: float) -> None:
        self.seconds, self.json, self.device, self.tiny = seconds, path, "cpu", True


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`check(parts, seconds)` runs parts whose functions are in a module of this test; returns what is in the JSON."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "gpu_faults.py").write_text(_FAULTS)
    import batchjob.bench

    monkeypatch.setattr(batchjob.bench, "__path__", [*batchjob.bench.__path__, str(package)])
    monkeypatch.setattr("batchjob.bench.gpu_task.import_module", lambda name: _load(package, name), raising=True)

    def run(parts: list[Part], seconds: float = 60.0) -> dict[str, Any]:
        import multiprocessing

        path = tmp_path / "found.json"
        runner = Check(_Arguments(path, seconds), tmp_path)  # type: ignore[arg-type]
        runner._context = multiprocessing.get_context("fork")  # so that the fixture's changes hold in the parts
        runner.run(parts)
        found: dict[str, Any] = json.loads(path.read_text())
        table(found)
        return found["parts"]

    return run


def _load(package: Path, name: str) -> Any:
    import importlib.util

    spec = importlib.util.spec_from_file_location(name, package / f"{name.rpartition('.')[2]}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_FAULTS = """
import os, signal, subprocess, sys, time

def works(task, report):
    report.add(value=task.settings.get("value", 1))

def raises(task, report):
    report.add(before=1)
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

def dies(task, report):
    report.add(before=2)
    os.kill(os.getpid(), signal.SIGKILL)

def hangs(task, report):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    report.add(child=child.pid)
    time.sleep(1000)

def picky(task, report):
    if "safe" not in task.settings:
        raise RuntimeError("not this way")
    report.add(published={"output_tok_s": 5.0, "seconds": 1.0})

def partly(task, report):
    report.attempt("bad", lambda: 1 / 0)
    report.attempt("good", lambda: 7)
"""


def part(name: str, *, share: float = 1.0, least: float = 0.0, **more: Any) -> Part:
    return Part(name, f"gpu_faults:{name}", share, least, **more)


def test_a_part_that_fails_or_dies_leaves_what_it_found_and_the_others_alone(check: Any) -> None:
    found = check([part("raises"), part("dies"), part("partly"), part("works")])
    assert found["raises"]["status"] == "failed"
    assert "illegal memory access" in found["raises"]["error"]
    assert "Traceback" in found["raises"]["traceback"]
    assert found["raises"]["before"] == 1
    assert found["dies"]["status"] == "died (-9)"
    assert found["dies"]["before"] == 2
    assert found["partly"]["status"] == "errors"
    assert found["partly"]["errors"] == {"bad": "ZeroDivisionError: division by zero"}
    assert found["partly"]["good"] == 7
    assert found["works"]["status"] == "ok"
    assert found["works"]["value"] == 1


def test_a_part_that_hangs_is_stopped_with_its_processes(check: Any) -> None:
    started = time.monotonic()
    found = check([part("hangs", share=0.1), part("works")], 20.0)
    assert time.monotonic() - started < 15
    assert found["hangs"]["status"] == "timed out"
    assert found["works"]["status"] == "ok"
    for _ in range(50):
        if not _is_running(found["hangs"]["child"]):
            return
        time.sleep(0.1)
    raise AssertionError("its process goes on")


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_budget_is_kept_and_what_has_no_time_left_is_skipped(check: Any) -> None:
    started = time.monotonic()
    found = check([part("hangs"), part("works", least=20.0)], 4.0)
    assert time.monotonic() - started < 10
    assert found["works"]["status"] == "skipped"
    assert "left" in found["works"]["reason"]


def test_what_fails_is_tried_again_in_a_safer_way(check: Any) -> None:
    found = check([part("picky", retries=({"still": "not"}, {"safe": True}))])
    assert found["picky"]["status"] == "ok"
    assert found["picky"]["settings"] == {"safe": True}
    assert found["picky"]["failed_before"]["status"] == "failed"


def test_parts_that_are_not_run_again_stay_in_the_file(check: Any) -> None:
    check([part("works")])
    assert set(check([part("partly")])) == {"works", "partly"}


# -- the table


def test_the_table_names_what_was_reached_and_what_was_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    published = {"output_tok_s": 24_000.0, "seconds": 5.6, "fraction_of_bound": 0.69, "bound_output_tok_s": 35_000.0}
    document = {
        "parts": {
            "smoke": {
                "status": "ok",
                "device": {"name": "A GPU"},
                "limits": {"flops": 7e14, "bytes_per_second": 4.2e12, "dtype": "bfloat16"},
            },
            "best/Qwen3-0.6B": {"status": "ok", "seconds": 20.0, "published": published},
            "generate_batch/Qwen3-0.6B": {
                "status": "ok",
                "seconds": 12.0,
                "published": {"output_tok_s": 10_000.0, "seconds": 13.4},
            },
            "attention, triton": {"status": "ok", "triton": {"decode 8 x 8192": {"us": 80.0, "of_copy": 0.81}}},
            "start": {"status": "skipped", "reason": "3 s left, 20 needed"},
        }
    }
    text = table(document)
    assert "copy 4.200 TB/s, bfloat16 matrix product 700.0 TFLOP/s" in text
    assert "24,000" in text
    assert "69%" in text
    assert "decode 8 x 8192: 80.0 us, 81% of copy" in text
    assert "2.40 x" in text
    assert "skipped: 3 s left, 20 needed" in text
    path = tmp_path / "found.json"
    path.write_text(json.dumps(document))
    print_report([str(path)])
    assert capsys.readouterr().out == text + "\n"
    assert "24,000 tok/s  69% of its bound" in headline("best", document["parts"]["best/Qwen3-0.6B"])


# -- the command


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--shapes", "GPT-2"], ["--set", "speed=9"]):
        with pytest.raises(SystemExit):
            main(arguments)
    assert "no setting 'speed'" in capsys.readouterr().err


def test_parts_can_be_picked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--parts", "best,start", "--skip", "Llama"]) == 0
    assert capsys.readouterr().out.split("\n")[:-1] == ["best/Qwen3-0.6B", "best/Qwen3-8B", "start"]


def rehearse(tmp_path: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    path = tmp_path / "gpu.json"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "batchjob.bench.gpu_check",
            "--device",
            "cpu",
            "--tiny",
            "--json",
            str(path),
            *arguments,
        ],
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert path.exists(), done.stderr
    found: dict[str, Any] = json.loads(path.read_text())["parts"]
    assert done.returncode == 0, done.stdout + json.dumps({k: v for k, v in found.items() if v["status"] != "ok"})
    return found, done.stdout


@pytest.mark.usefixtures("_with_triton")
def test_the_short_rehearsal(tmp_path: Path) -> None:
    found, printed = rehearse(tmp_path, "--seconds", "120", "--shapes", "Qwen3-0.6B", "--parts", "best,4 steps")
    assert {name: entry["status"] for name, entry in found.items()} == {
        "best/Qwen3-0.6B": "ok",
        "Qwen3-0.6B, 4 steps per launch": "ok",
    }
    best = found["best/Qwen3-0.6B"]
    assert best["published"]["whole"]
    assert best["published"]["rows"] == 10
    assert best["azure"]["rows"] == 6
    assert best["profile"]["step_us"] > 0
    assert found["Qwen3-0.6B, 4 steps per launch"]["config"]["decode_steps_per_launch"] == 4
    assert "rehearsal" in printed


@pytest.fixture
def _with_triton() -> None:
    pytest.importorskip("triton")


@pytest.mark.long
@pytest.mark.timeout(1900)
@pytest.mark.usefixtures("_with_triton")
def test_the_whole_rehearsal(tmp_path: Path) -> None:
    parts = parts_for(list(SHAPES), {}, tiny=True, on_cpu=True)
    found, printed = rehearse(tmp_path, "--seconds", "1500")
    assert set(found) == {part.name for part in parts}
    assert {entry["status"] for entry in found.values()} == {"ok"}
    assert found["smoke"]["engine"] == "6 rows have the tokens of the CPU"
    assert found["best/Qwen3-8B"]["published"]["fraction_of_bound"] > 0
    assert found["kernel tests"]["tests"]["passed"] > 10
    assert "refused" in found["Qwen3-0.6B, flash"]["engine"]
    rows = 48
    assert found["kill and resume"]["rows"] == rows
    assert 0 < found["kill and resume"]["rows_when_killed"] < rows
    assert found["start"]["warm"]["python"] < found["start"]["warm"]["first token"] < found["start"]["warm"]["steady"]
    assert "best to generate_batch/Qwen3-0.6B" in printed
