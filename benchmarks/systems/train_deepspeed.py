"""Training with DeepSpeed on the CPU: ZeRO-3, hpZ, and what it keeps on the host.

DeepSpeed reads the environment at import, so the driver sets DS_ACCELERATOR=cpu before it starts a worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import deepspeed
from torch import Tensor, nn

from benchmarks.systems.model import Gpt
from benchmarks.systems.train_torch import make_adamw
from benchmarks.systems.trainer import HostMemoryUse, RankOfNodes

OFFLOADED = {
    "ds-hpz-offload": ("offload_param",),
    "ds-offload": ("offload_optimizer",),
    "ds-zero3-offload": ("offload_optimizer", "offload_param"),
}
"""What each system keeps on the host, as DeepSpeed's options."""


class DeepspeedTrainer:
    """DeepSpeed's engine; one engine serves every accumulation, as the trainer sets the boundary itself."""

    def __init__(self, engine: Any, zero: Mapping[str, Any]) -> None:
        self.engine = engine
        self._zero = zero

    def micro_batch(self, ids: Tensor, *, is_last: bool, accumulation: int) -> Tensor:
        self.engine.set_gradient_accumulation_boundary(is_last)
        loss: Tensor = self.engine(ids)
        self.engine.backward(loss / accumulation)
        return loss.detach()

    def step(self) -> None:
        self.engine.step()  # clears the gradients too

    def host_memory(self) -> HostMemoryUse:
        tensors: list[Tensor] = []
        if "offload_param" in self._zero:
            tensors += [p.ds_tensor for p in self.engine.module.parameters()]
        if "offload_optimizer" in self._zero:
            states = self.engine.optimizer.optimizer.state
            # DeepSpeed steps a copy of each parameter's part, beside which it keeps the gradient.
            tensors += [t for p, state in states.items() for t in (p, p, *state.values())]
        return HostMemoryUse(heap_bytes=sum(t.nbytes for t in tensors))


def make_trainer(name: str, model: Gpt, place: RankOfNodes) -> DeepspeedTrainer:
    """Shard the model with the named variant of ZeRO-3."""
    deepspeed.init_distributed(dist_backend="gloo")
    config = make_config(name, place, block_elements=_elements(model.blocks[0]))
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=make_adamw(list(model.parameters())), config=config
    )
    return DeepspeedTrainer(engine, config["zero_optimization"])


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
    if name == "ds-offload":
        zero = {"stage": 2, "reduce_bucket_size": block_elements}
    if "hpz" in name:
        zero["zero_hpz_partition_size"] = place.ranks_per_node
    on_host = {"device": "cpu", "pin_memory": False}
    zero |= dict.fromkeys(OFFLOADED.get(name, ()), on_host)
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
