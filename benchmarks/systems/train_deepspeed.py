"""Training with DeepSpeed on the CPU: ZeRO-3, hpZ, and hpZ with parameters offloaded.

DeepSpeed reads the environment at import, so the driver sets DS_ACCELERATOR=cpu before it starts a worker.
"""

from __future__ import annotations

from typing import Any

import deepspeed
from torch import Tensor, nn

from benchmarks.systems.model import Gpt
from benchmarks.systems.train_torch import make_adamw
from benchmarks.systems.trainer import ParametersOnHost, RankOfNodes


class DeepspeedTrainer:
    """DeepSpeed's engine; one engine serves every accumulation, as the trainer sets the boundary itself."""

    def __init__(self, engine: Any, *, is_offloaded: bool) -> None:
        self.engine = engine
        self._is_offloaded = is_offloaded

    def micro_batch(self, ids: Tensor, *, is_last: bool, accumulation: int) -> Tensor:
        self.engine.set_gradient_accumulation_boundary(is_last)
        loss: Tensor = self.engine(ids)
        self.engine.backward(loss / accumulation)
        return loss.detach()

    def step(self) -> None:
        self.engine.step()  # clears the gradients too

    def host_memory(self) -> ParametersOnHost:
        if not self._is_offloaded:
            return ParametersOnHost()
        parameters = self.engine.module.parameters()
        return ParametersOnHost(heap_bytes=sum(p.ds_tensor.nbytes for p in parameters))


def make_trainer(name: str, model: Gpt, place: RankOfNodes) -> DeepspeedTrainer:
    """Shard the model with the named variant of ZeRO-3."""
    deepspeed.init_distributed(dist_backend="gloo")
    is_offloaded = name == "ds-hpz-offload"
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=make_adamw(list(model.parameters())),
        config=make_config(name, place, block_elements=_elements(model.blocks[0])),
    )
    return DeepspeedTrainer(engine, is_offloaded=is_offloaded)


def make_config(name: str, place: RankOfNodes, *, block_elements: int) -> dict[str, Any]:
    """DeepSpeed's configuration.

    gradient_clipping: the default of 1.0 changes the losses.  stage3_max_live_parameters and
    stage3_max_reuse_distance: with the defaults, a model below a billion parameters is never resharded, so
    its ZeRO-3 would hold all parameters.  reduce_bucket_size: DeepSpeed allocates a buffer of this size, by
    default 2 GB, however small the model is; FSDP2 reduces one layer at a time, so this does, too.
    """
    zero: dict[str, Any] = {
        "stage": 3,
        "stage3_max_live_parameters": 0,
        "stage3_max_reuse_distance": 0,
        "reduce_bucket_size": block_elements,
    }
    if name != "ds-zero3":
        zero["zero_hpz_partition_size"] = place.ranks_per_node
    if name == "ds-hpz-offload":
        zero["offload_param"] = {"device": "cpu", "pin_memory": False}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }


def _elements(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
