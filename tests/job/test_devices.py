"""Which devices a job gets, with what a machine shows of its GPUs laid out in a directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchjob.errors import UsageError
from batchjob.job.devices import find_devices, visible_gpus
from batchjob.spec import JobSpec


def machine(root: Path, *, files: int = 0, driver: int = 0, instances: int = 0) -> Path:
    """`files` GPUs have a device file, the driver lists `driver`, and GPU 0 is divided into `instances`."""
    (root / "dev").mkdir(parents=True)
    for name in ["null", *(["nvidiactl", "nvidia-uvm"] if files else []), *(f"nvidia{i}" for i in range(files))]:
        (root / "dev" / name).touch()
    for index in range(driver):
        (root / f"proc/driver/nvidia/gpus/0000:{index:02x}:00.0").mkdir(parents=True)
    for index in range(instances):
        (root / f"proc/driver/nvidia/capabilities/gpu0/mig/gi{index}").mkdir(parents=True)
    return root


def names(root: Path, environ: dict[str, str] | None = None, **spec: str) -> list[str]:
    return [device.name for device in find_devices(JobSpec(**spec), environ or {}, root)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("files", "driver", "expected"),
    [(0, 0, 0), (4, 4, 4), (4, 0, 4), (0, 2, 2), (1, 8, 1), (8, 2, 2)],
    ids=["none", "all", "no list", "no files", "a container with one of eight", "a filtered list"],
)
def test_gpus_are_seen_by_their_files_and_the_drivers_list(
    tmp_path: Path, files: int, driver: int, expected: int
) -> None:
    assert len(visible_gpus({}, machine(tmp_path / "m", files=files, driver=driver))) == expected


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        ("0,1,2,3", ["0", "1", "2", "3"]),
        ("2, 1", ["2", "1"]),
        ("", []),
        ("NoDevFiles", []),
        ("-1", []),
        ("1,-1,2", ["1"]),
        ("1,9,2", ["1"]),
        ("1,1", ["1"]),
        ("GPU-8f2c,GPU-91aa", ["GPU-8f2c", "GPU-91aa"]),
        ("MIG-5a,MIG-6b", ["MIG-5a", "MIG-6b"]),
        ("gpu0", []),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(tmp_path: Path, variable: str, expected: list[str]) -> None:
    root = machine(tmp_path / "m", files=4, driver=4)
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": variable}, root) == expected


def test_without_a_gpu_the_variable_shows_none(tmp_path: Path) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,GPU-1"}, machine(tmp_path / "m")) == []


def test_auto_is_every_visible_gpu_or_else_the_cpu(tmp_path: Path) -> None:
    four, none = machine(tmp_path / "four", files=4), machine(tmp_path / "none")
    assert names(four) == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert names(four, {"CUDA_VISIBLE_DEVICES": "2,3"}) == ["cuda:0", "cuda:1"]
    assert names(none) == ["cpu"]
    assert names(four, engine="fake") == ["cpu"]
    assert names(four, devices="all", engine="fake") == names(four)
    with pytest.raises(UsageError, match="no GPU is visible"):
        names(none, devices="all")


def test_a_list_names_indices_among_the_visible_gpus(tmp_path: Path) -> None:
    four = machine(tmp_path / "four", files=4)
    assert names(four, devices="3,cuda:1") == ["cuda:3", "cuda:1"]
    assert names(four, devices="0") == ["cuda:0"]
    for devices, message in [
        ("0,4", "names cuda:4, but 4 GPUs are visible"),
        ("1,cuda:1", "cuda:1 twice"),
        ("0,cpu", "not both"),
        ("0,,1", "must be auto, all, or a list"),
        ("gpu", "must be auto, all, or a list"),
    ]:
        with pytest.raises(UsageError, match=message):
            names(four, devices=devices)
    with pytest.raises(UsageError, match="cuda:1, but 1"):
        names(four, {"CUDA_VISIBLE_DEVICES": "3"}, devices="0,1")


def test_a_split_model_takes_gpus_in_a_row(tmp_path: Path) -> None:
    five = machine(tmp_path / "five", files=5)
    two_each = {"tensor_parallel": 2}
    devices = find_devices(JobSpec(**two_each), {}, five)
    assert [(device.name, device.device) for device in devices] == [("cuda:0-1", "cuda:0"), ("cuda:2-3", "cuda:2")]
    listed = find_devices(JobSpec(devices="3,4,0,1", **two_each), {}, five)
    assert [device.device for device in listed] == ["cuda:3", "cuda:0"]
    for devices_ in ("0,2", "0,1,2"):
        with pytest.raises(UsageError, match="2 GPUs in a row"):
            find_devices(JobSpec(devices=devices_, **two_each), {}, five)
    assert len(find_devices(JobSpec(tensor_parallel=8), {}, five)) == 1


def test_device_is_exactly_one_and_excludes_a_list(tmp_path: Path) -> None:
    four = machine(tmp_path / "four", files=4)
    assert names(four, device="cuda:1") == ["cuda:1"]
    assert names(four, device="cpu") == ["cpu"]
    with pytest.raises(UsageError, match="exclude each other"):
        JobSpec(device="cuda:1", devices="0,1")
    with pytest.raises(UsageError, match="--device must be"):
        names(four, device="gpu")


def test_workers_on_the_cpu_share_its_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchjob.job.devices._num_cpus", lambda: 13)
    root = machine(tmp_path / "m")
    devices = find_devices(JobSpec(devices="cpu,cpu,cpu"), {}, root)
    assert [(d.name, d.device, d.environ["OMP_NUM_THREADS"]) for d in devices] == [
        (f"cpu:{i}", "cpu", "4") for i in range(3)
    ]
    (own, _) = find_devices(JobSpec(devices="cpu,cpu"), {"OMP_NUM_THREADS": "2"}, root)
    assert own.environ == {}, "what the user has set stays"


def test_each_part_of_a_divided_gpu_is_shown_to_its_worker_alone(tmp_path: Path) -> None:
    root = machine(tmp_path / "m", files=1, instances=2)
    assert names(root) == ["cuda:0"], "without the variable CUDA shows one of them"
    first, second = find_devices(JobSpec(), {"CUDA_VISIBLE_DEVICES": "MIG-5a,MIG-6b"}, root)
    assert (first.device, first.environ) == ("cuda:0", {"CUDA_VISIBLE_DEVICES": "MIG-5a"})
    assert (second.name, second.device, second.environ) == ("cuda:1", "cuda:0", {"CUDA_VISIBLE_DEVICES": "MIG-6b"})
