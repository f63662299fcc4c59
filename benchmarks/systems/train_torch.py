"""Training with PyTorch's own DDP, FSDP2 and HSDP, and without communication."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import fcdp_compile
from benchmarks.systems.model import Gpt
from benchmarks.systems.trainer import LEARNING_RATE, WEIGHT_DECAY, HostMemoryUse, RankOfNodes


def make_adamw(parameters: list[nn.Parameter]) -> torch.optim.AdamW:
    """Make the optimizer that every system uses, DeepSpeed included."""
    trained = [p for p in parameters if p.requires_grad]
    return torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)


def make_muon(muon: type[torch.optim.Muon], model: Gpt) -> torch.optim.Optimizer:
    """Make Muon for the matrices of the blocks, and AdamW for the other parameters."""
    matrices = [p for block in model.blocks for p in block.parameters() if p.ndim == 2]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    made = muon(matrices, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    return fcdp_compile.combine(made, make_adamw(rest))


class TorchTrainer:
    """The plain loop; systems differ in the model and in how they accumulate."""

    # Any: torch types neither a compiled nor a fully sharded module as a module.
    def __init__(
        self,
        model: Any,
        parameters: list[nn.Parameter],
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """optimizer: instead of AdamW of the parameters."""
        self.model = model
        self.optimizer = optimizer or make_adamw(parameters)

    def micro_batch(self, ids: Tensor, *, is_last: bool, accumulation: int) -> Tensor:
        with self.accumulating(is_last=is_last):
            loss: Tensor = self.model(ids)
            (loss / accumulation).backward()
        return loss.detach()

    def accumulating(self, *, is_last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def host_memory(self) -> HostMemoryUse:
        return HostMemoryUse()


class DdpTrainer(TorchTrainer):
    """All-reduces gradients in the last micro-batch only; DDP holds them whole anyway."""

    def accumulating(self, *, is_last: bool) -> AbstractContextManager[None]:
        return nullcontext() if is_last else self.model.no_sync()


class Bf16DdpTrainer(DdpTrainer):
    """Computes in bf16, keeps fp32 parameters and compresses gradients by a hook of DDP."""

    def __init__(
        self, model: DistributedDataParallel, hook: Callable[..., Any], state: Any
    ) -> None:
        model.register_comm_hook(state, hook)
        super().__init__(model, list(model.parameters()))

    def accumulating(self, *, is_last: bool) -> AbstractContextManager[None]:
        stack = ExitStack()
        stack.enter_context(super().accumulating(is_last=is_last))
        stack.enter_context(torch.autocast("cpu", torch.bfloat16))
        return stack


class HsdpTrainer(TorchTrainer):
    """Reduces gradients within the node in every micro-batch, between nodes in the last."""

    def accumulating(self, *, is_last: bool) -> AbstractContextManager[None]:
        self.model.set_requires_all_reduce(is_last)
        return nullcontext()


class NoSyncTrainer(TorchTrainer):
    """Reduces gradients in the last micro-batch only; until then they are whole."""

    def accumulating(self, *, is_last: bool) -> AbstractContextManager[None]:
        self.model.set_requires_gradient_sync(is_last)
        return nullcontext()


class OffloadTrainer(TorchTrainer):
    """Parts of parameters, their gradients and their moments are on the host."""

    def __init__(self, sharded: nn.Module) -> None:
        super().__init__(sharded, list(sharded.parameters()))

    def host_memory(self) -> HostMemoryUse:
        owned = [p for group in self.optimizer.param_groups for p in group["params"]]
        moments = [t for p in owned for t in self.optimizer.state[p].values()]
        tensors = [t for t in (*owned, *owned, *moments) if isinstance(t, DTensor)]
        return HostMemoryUse(heap_bytes=sum(t.to_local().nbytes for t in tensors))


def make_compute_trainer(model: Gpt, place: RankOfNodes) -> TorchTrainer:
    """Make a trainer without communication, to time the compute that all systems share.

    The optimizer has only this rank's share of the parameters, as with sharded optimizer state.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    return TorchTrainer(model, parameters[place.rank :: place.ranks])


def make_trainer(name: str, model: Gpt, place: RankOfNodes) -> TorchTrainer:
    """Wrap the model in the named system."""
    if name == "ddp":
        return DdpTrainer(DistributedDataParallel(model), list(model.parameters()))
    if name == "ddp-fp16":
        return Bf16DdpTrainer(DistributedDataParallel(model), fp16_compress_hook, None)
    if name == "ddp-powersgd":
        state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        # One bucket: on Gloo, the messages of several would overtake each other.
        return Bf16DdpTrainer(
            DistributedDataParallel(model, bucket_cap_mb=2**14), powerSGD_hook, state
        )
    if name == "hsdp":
        shape = (place.nodes, place.ranks_per_node)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("inter", "intra"))
        sharded = _shard_blocks(model, mesh)
        return HsdpTrainer(sharded, list(sharded.parameters()))
    mesh = init_device_mesh("cpu", (place.ranks,))
    if name == "fsdp2-node":
        sharded = _shard_blocks(model, mesh, reshard_after_forward=place.ranks_per_node)
        return TorchTrainer(sharded, list(sharded.parameters()))
    if name == "fsdp2-compiled":
        # Before fully_shard, so that its hooks stay outside of the compiled blocks.
        for block in model.blocks:
            block.compile()
    if name == "fsdp2-offload":
        offloaded = CPUOffloadPolicy(pin_memory=False)
        return OffloadTrainer(_shard_blocks(model, mesh, offload_policy=offloaded))
    if name == "fsdp2-bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        sharded = _shard_blocks(model, mesh, mp_policy=policy)
        return TorchTrainer(sharded, list(sharded.parameters()))
    sharded = _shard_blocks(model, mesh)
    if name == "fsdp2-muon":
        return TorchTrainer(sharded, [], make_muon(torch.optim.Muon, model))
    kind = NoSyncTrainer if name == "fsdp2-nosync" else TorchTrainer
    return kind(sharded, list(sharded.parameters()))


def _shard_blocks(model: Gpt, mesh: DeviceMesh, **options: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model
