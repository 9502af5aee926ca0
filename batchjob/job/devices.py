"""The devices of a job: those that are here, as --device and --devices choose among them. Standard library only.

GPUs are found without CUDA: a process that asks CUDA has a context on a GPU, which the supervisor must never have.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from batchjob.errors import UsageError
from batchjob.spec import JobSpec

_INDEX = re.compile(r"(?:cuda:)?(\d{1,4})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Device:
    """One worker's device. `name` tells it from the others of a command; `device` and `environ` are what its process
    gets: a value for --device, and variables on top of those that are set."""

    name: str
    device: str
    environ: Mapping[str, str] = field(default_factory=dict)


def find_devices(spec: JobSpec, environ: Mapping[str, str] | None = None, root: Path = Path("/")) -> list[Device]:
    """The devices that a job asks for, one worker each; never empty. Raises UsageError.

    --device names exactly one. Without it --devices does: `auto` is every visible GPU, or else the CPU (which is all
    that the fake engine needs), `all` the same but an error without a GPU, and anything else is a list: indices among
    the visible GPUs (0,1 or cuda:0,cuda:1), or cpu as often as there are to be workers. With --tensor-parallel N each
    worker gets N GPUs in a row, of which its device is the first.
    """
    environ = os.environ if environ is None else environ
    asked = spec.devices
    if spec.device != "auto":
        if asked != "auto":
            raise UsageError("--device and --devices exclude each other: --device is for one device")
        if not re.fullmatch(r"cpu|cuda(:\d+)?", spec.device, re.ASCII):
            raise UsageError(f"--device must be auto, cpu, cuda or cuda:N, not {spec.device!r}")
        return [Device(spec.device, spec.device)]
    if asked in ("auto", "all"):
        if asked == "auto" and spec.engine == "fake":
            return [Device("cpu", "cpu")]
        gpus = visible_gpus(environ, root)
        if not gpus and asked == "all":
            raise UsageError("--devices all: no GPU is visible here")
        if not gpus:
            return [Device("cpu", "cpu")]
        size = spec.tensor_parallel
        firsts = range(0, max(1, len(gpus) - size + 1), size)  # the engine says so if there are too few for one worker
        return [_gpu(gpus, index, size) for index in firsts]
    return _listed([item.strip() for item in asked.split(",")], spec.tensor_parallel, environ, root)


def only_device(spec: JobSpec) -> tuple[str, str | None]:
    """The device of a job that runs in one process, as a value for --device, and what to say if it asks for more.

    Raises UsageError.
    """
    devices = find_devices(spec)
    first = devices[0].device
    if len(devices) == 1:
        return first, None
    names = ", ".join(device.name for device in devices)
    return first, f"warning: one process runs on one device: {first} is used, not all of {names}"


def _listed(items: Sequence[str], size: int, environ: Mapping[str, str], root: Path) -> list[Device]:
    """`size`: GPUs of each worker."""
    if all(item == "cpu" for item in items):
        return [Device("cpu", "cpu")] if len(items) == 1 else _cpus(len(items), environ)
    matches = [_INDEX.fullmatch(item) for item in items]
    if any(match is None and item != "cpu" for match, item in zip(matches, items, strict=True)):
        raise UsageError(
            f"--devices must be auto, all, or a list such as 0,1 or cuda:0,cuda:1 or cpu,cpu, not {','.join(items)!r}"
        )
    if "cpu" in items:
        raise UsageError("--devices takes GPUs or the CPU, not both: they compute in different precision")
    indices = [int(match[1]) for match in matches if match is not None]
    gpus = visible_gpus(environ, root)
    for index in indices:
        if index >= len(gpus):
            seen = f"{len(gpus)} GPUs are visible here" if gpus else "no GPU is visible here"
            raise UsageError(f"--devices names cuda:{index}, but {seen}")
        if indices.count(index) > 1:
            raise UsageError(f"--devices names cuda:{index} twice")
    groups = [indices[start : start + size] for start in range(0, len(indices), size)]
    if any(group != list(range(group[0], group[0] + size)) for group in groups):
        raise UsageError(f"--devices must name {size} GPUs in a row for each worker, as --tensor-parallel {size} says")
    return [_gpu(gpus, group[0], size) for group in groups]


def _gpu(gpus: Sequence[str], index: int, size: int) -> Device:
    """A process sees one part of a divided GPU (MIG) at most, so each worker is shown its own alone."""
    device = f"cuda:{index}"
    if gpus[index].startswith("MIG-"):
        return Device(device, "cuda:0", {"CUDA_VISIBLE_DEVICES": gpus[index]})
    return Device(device if size == 1 else f"{device}-{index + size - 1}", device)


def _cpus(number: int, environ: Mapping[str, str]) -> list[Device]:
    """Workers on the same CPU, each with its share of the threads unless the user has set their number."""
    threads = max(1, _num_cpus() // number)
    shares = {} if environ.get("OMP_NUM_THREADS") else {"OMP_NUM_THREADS": str(threads)}
    return [Device(f"cpu:{index}", "cpu", shares) for index in range(number)]


def _num_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# -- GPUs


def visible_gpus(environ: Mapping[str, str], root: Path = Path("/")) -> list[str]:
    """Returns the GPUs in the order in which CUDA numbers them: the entries of CUDA_VISIBLE_DEVICES, or the numbers of
    the GPUs that are here.

    As for CUDA, the list ends before the first entry that names nothing (SLURM writes NoDevFiles), and numbers
    beyond the GPUs that are here name nothing.
    """
    number = _num_gpus(root)
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return [str(index) for index in range(1 if _is_divided(root) else number)]
    found: list[str] = []
    for entry in (item.strip() for item in wanted.split(",")):
        is_index = entry.isascii() and entry.isdigit() and int(entry) < number
        if entry in found or not (is_index or (entry.startswith(("GPU-", "MIG-")) and number)):
            break
        found.append(entry)
    return found


def _num_gpus(root: Path) -> int:
    """A container may show the driver's list of all GPUs and the device files of some, or the other way round."""
    files = [path for path in _listdir(root / "dev") if re.fullmatch(r"nvidia\d+", path)]
    driver = _listdir(root / "proc/driver/nvidia/gpus")
    counts = [len(names) for names in (files, driver) if names]
    return min(counts, default=0)


def _is_divided(root: Path) -> bool:
    """Returns True if there are instances of a divided GPU. CUDA shows one of them to a process that names none."""
    capabilities = root / "proc/driver/nvidia/capabilities"
    gpus = [name for name in _listdir(capabilities) if name.startswith("gpu")]
    return any(name.startswith("gi") for gpu in gpus for name in _listdir(capabilities / gpu / "mig"))


def _listdir(path: Path) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []
