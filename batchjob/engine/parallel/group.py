"""`Group`: one process's place among those that a model is split over, and what they tell each other.

The split itself is Transformers' own plan for the model. Every process makes the same calls in the same order; what
they must not work out apart (sampled tokens, sizes) goes through here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from math import gcd
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from batchjob.engine.steps.inputs import StepInputs
from batchjob.engine.steps.steps import Draw
from batchjob.errors import EngineError, UnsupportedModelError

# How long a process waits for the others within a step or a load: reading weights and compiling kernels take one longer
# than another. The end of a process is seen at once by other means; this only ends what nothing else would.
_TIMEOUT = timedelta(minutes=30)
_SIZES = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size")


class Group:
    """Joins the others on construction, and blocks until all are there.

    `rank` 0 has scheduler and sampler; `send` hands the inputs of its steps to the other ranks. `meeting` is a file,
    not there before, in a directory of the user's own: no port is opened but those of gloo and NCCL between the ranks.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        meeting: Path,
        send: Callable[[StepInputs], None] = lambda inputs: None,
    ) -> None:
        if dist.is_initialized():
            raise EngineError("this process is a member of a torch.distributed group; --tensor-parallel makes its own")
        self.rank, self.size, self.device, self.send = rank, size, device, send
        is_gpu = device.type == "cuda"
        if is_gpu:
            torch.cuda.set_device(device)
        # PyTorch numbers its groups, and counts those that failed here; ranks find each other under a number.
        dist.distributed_c10d._world.group_count = 0
        with self.environment():
            dist.init_process_group(
                "nccl" if is_gpu else "gloo",
                store=FileStore(str(meeting), size),
                rank=rank,
                world_size=size,
                timeout=_TIMEOUT,
                device_id=device if is_gpu else None,
            )

    @contextmanager
    def environment(self) -> Iterator[None]:
        """Variables while groups are made and the model is loaded: gloo listens where it is told to, NCCL leaves it to
        us to end what waits for a rank that is gone, and Transformers takes the device's index from LOCAL_RANK."""
        values = {"LOCAL_RANK": str(self.device.index or 0), "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
        if Path("/sys/class/net/lo").exists():
            values["GLOO_SOCKET_IFNAME"] = "lo"
        before = {name: os.environ.get(name) for name in values}
        os.environ.update(values)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    def least(self, *numbers: int) -> list[int]:
        """The smallest of each number among all ranks."""
        tensor = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MIN)
        return tensor.tolist()

    def shared(self, draw: Draw) -> Draw:
        """Returns the draw of this rank. Rank 0 draws with `draw`, and the others take its tokens, in the order of the
        device's work."""
        return self._take if self.rank else partial(self._share, draw)

    def _share(
        self, draw: Draw, logits: Tensor, slots: Tensor, num_output_tokens: Tensor, *, needs_ended: bool
    ) -> tuple[Tensor, Tensor | None]:
        tokens, ended = draw(logits, slots, num_output_tokens, needs_ended=needs_ended)
        dist.broadcast(tokens[None] if ended is None else torch.stack((tokens, ended.long())), src=0)
        return tokens, ended

    def _take(
        self, logits: Tensor, slots: Tensor, num_output_tokens: Tensor, *, needs_ended: bool
    ) -> tuple[Tensor, Tensor | None]:
        shared = torch.empty(2 if needs_ended else 1, len(slots), dtype=torch.int64, device=self.device)
        dist.broadcast(shared, src=0)
        return shared[0], shared[1].bool() if needs_ended else None

    def close(self) -> None:
        if self.device.type == "cuda":
            abort()  # NCCL's ordinary end waits for the other ranks, which may be gone
        elif dist.is_initialized():
            dist.destroy_process_group()


def abort() -> None:
    """Ends what NCCL waits for, from any thread."""
    from torch.distributed.distributed_c10d import _abort_process_group

    if dist.is_initialized():
        _abort_process_group()


def check_plan(path: Path, config: Any, size: int) -> None:
    """Raises UnsupportedModelError where Transformers cannot split the model into so many parts of one size."""
    text = config.get_text_config()
    plan = getattr(text, "base_model_tp_plan", None) or {}
    keys = ("k_proj", "qkv_proj", "query_key_value")
    if not any(name.rsplit(".", 1)[-1] in keys and "colwise" in style for name, style in plan.items()):
        raise UnsupportedModelError(
            f"Transformers has no plan that splits {config.model_type} models; run it without --tensor-parallel"
        )
    sizes = {name: value for name in _SIZES if isinstance(value := getattr(text, name, None), int)}
    uneven = [f"{value} ({name})" for name, value in sizes.items() if value % size]
    if uneven:
        common = gcd(*sizes.values())
        works = [str(number) for number in range(2, common + 1) if common % number == 0]
        raise UnsupportedModelError(
            f"{path.name} cannot be split evenly over {size} processes: {', '.join(uneven)}; --tensor-parallel works "
            + (f"with {' or '.join(works)}" if works else "with no number but 1")
        )
