"""`create_engine`: the one place that knows which runner a job asks for. Imports torch only when a model is run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from batchjob.core.step_plan import StepPlan
from batchjob.engine.config import EngineConfig, Runner
from batchjob.engine.engine import Engine
from batchjob.engine.fake import FakeRunner, fake_capacity
from batchjob.engine.openmp import prepare_openmp
from batchjob.spec import JobSpec
from batchjob.tasks import Detokenizer


class ModelSource(Protocol):
    """A resolved model: the local directory with its config and safetensors."""

    @property
    def path(self) -> object: ...


def create_engine(
    spec: JobSpec,
    model: ModelSource | None,
    config: EngineConfig,
    detokenizer: Detokenizer,
    *,
    before_step: Callable[[StepPlan], None] | None = None,
) -> Engine:
    """Loads the model and returns an engine ready for requests. The fake engine needs no model. `before_step`: see
    `Engine`.

    Raises EngineError, or UnsupportedModelError where the model needs something that the engine does not do.
    """
    runner: Runner
    if spec.engine == "fake":
        runner = FakeRunner(fake_capacity(config))
    else:
        prepare_openmp()
        assert model is not None
        if config.tensor_parallel > 1:
            from batchjob.engine.parallel.runner import ParallelRunner

            runner = ParallelRunner(str(model.path), config)
        else:
            from batchjob.engine.runner import TorchRunner

            runner = TorchRunner(str(model.path), config)
    return Engine(runner, detokenizer, config, before_step=before_step)
