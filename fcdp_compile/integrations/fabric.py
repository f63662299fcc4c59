"""A strategy for Lightning Fabric that shards instead of wrapping in DDP, and compiles with fcdp.

    fabric = Fabric(devices=8, num_nodes=4, strategy=FcdpStrategy())       # the one line that changes
    fabric.launch()
    model, optimizer = fabric.setup(model, optimizer)
    fabric.save("last", {"model": model, "optimizer": optimizer, "step": step})    # a folder
    fabric.load("last", state)                                        # on any number of nodes and ranks

Launching, samplers and the like are the DDP strategy's.
"""

from __future__ import annotations

from fcdp_compile.extras import require

require("lightning_fabric", "fcdp in Lightning Fabric")

import functools
import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from lightning_fabric.strategies.ddp import DDPStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fcdp_compile.core.params.mesh import make_mesh
from fcdp_compile.core.ranks.inner_mesh import CP, PP, TP
from fcdp_compile.core.sharding.no_sync import no_sync
from fcdp_compile.core.sharding.shard import is_sharded, mesh_of, shard
from fcdp_compile.errors import ArgumentError, CheckpointError
from fcdp_compile.integrations.optimizer_params import sharded_within
from fcdp_compile.integrations.options import FcdpOptions, refuse_shared
from fcdp_compile.models.checkpointing.loading import load
from fcdp_compile.models.checkpointing.saving import save

__all__ = ["FcdpOptions", "FcdpStrategy"]


class FcdpStrategy(DDPStrategy):
    """Shards and compiles the models that Fabric sets up.

    fcdp: the options; by default strategy "fcdp" on Fabric's nodes.
    ddp_options: `timeout`, `start_method`, `cluster_environment` and other options of Fabric's `DDPStrategy`,
    without those of torch's DistributedDataParallel.

    Raises: ArgumentError for options of DistributedDataParallel, which wraps nothing here.
    """

    def __init__(self, fcdp: FcdpOptions | None = None, **ddp_options: Any) -> None:
        super().__init__(**ddp_options)
        if self._ddp_kwargs:
            raise ArgumentError(
                f"FcdpStrategy got {', '.join(self._ddp_kwargs)}, which DistributedDataParallel takes, but "
                "it does not wrap the model in that; leave it out, or give FcdpOptions"
            )
        self.fcdp = fcdp or FcdpOptions()
        if self.fcdp.sharers != 1:
            raise ArgumentError(
                "Fabric's loaders do not know ranks that get the same batches; "
                f"FcdpOptions(cp={self.fcdp.cp}, tp={self.fcdp.tp}) is for "
                "integrations.transformers.Trainer and integrations.accelerate.Accelerator"
            )
        self._backward_sync_control = _NoSync()  # type: ignore[assignment]  # its class is private
        # Who installs `lightning` has Fabric twice, as two packages with different classes.
        if (other := sys.modules.get("lightning.fabric.strategies")) is not None:
            other.Strategy.register(FcdpStrategy)

    @functools.cached_property
    def _mesh(self) -> DeviceMesh | None:
        # One mesh for all models: torch never frees the groups of a mesh.
        device, local_rank = self.root_device, os.environ.get("LOCAL_RANK")
        if device.type == "cuda" and local_rank is not None and device.index != int(local_rank):
            raise ArgumentError(
                f"Fabric gives {device} to the process with LOCAL_RANK {local_rank}, but fcdp gives GPU n to "
                "local rank n; give Fabric the number of devices and choose GPUs by CUDA_VISIBLE_DEVICES"
            )
        return make_mesh(self.fcdp.nodes or self.num_nodes)

    # --- models and optimizers ----------------------------------------------------------------------------

    def module_to_device(self, module: nn.Module) -> None:
        """Move a model to the GPU, unless it has parameters on meta, which sharding gives memory there."""
        if not any(p.is_meta for p in module.parameters()):
            super().module_to_device(module)

    def setup_module(self, module: nn.Module) -> Any:
        """Shard the model in place, if its owner has not done so, and return it compiled."""
        options = self.fcdp.compile_arguments()
        # Fabric notes the options of torch.compile there, and would compile what this method returns again.
        if vars(module).get("_compile_kwargs", options) != options:
            raise ArgumentError(
                "the model was compiled before fabric.setup, but FcdpStrategy compiles it after sharding; "
                "leave torch.compile out, and give its options to FcdpOptions"
            )
        if is_sharded(module):
            self.fcdp.check_sharded_before(mesh_of(module))
            refuse_shared(mesh_of(module), (PP, CP, TP), "Fabric")
        else:
            shard(module, self._mesh, **self.fcdp.shard_arguments())
        return torch.compile(module, **options)

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], *scheduler: Any
    ) -> Any:
        """Shard the model, and give the optimizers the sharded parameters."""
        with sharded_within(optimizers, module):
            return super().setup_module_and_optimizers(module, optimizers, *scheduler)

    def clip_gradients_norm(self, *args: Any, **options: Any) -> torch.Tensor:
        """Clip by the norm over all ranks; return the norm as a plain tensor."""
        norm = super().clip_gradients_norm(*args, **options)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    # --- saving: all ranks must call these methods ---------------------------------------------------------

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Save to a folder with `fcdp_compile.save`; a state without a sharded model as the DDP strategy."""
        parts = _parts(state)
        if parts is None:
            super().save_checkpoint(path, state, storage_options, filter)
            return
        if filter:
            raise CheckpointError(
                "fabric.save(filter=…) cannot leave out parts of a sharded model; leave filter out, or call "
                "fcdp_compile.save(…, frozen=False), which leaves out frozen parameters"
            )
        save(path, parts.model, optimizer=parts.optimizer, extra=parts.rest)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, *args: Any, **options: Any
    ) -> dict[str, Any]:
        """Load what `save_checkpoint` saved, on any number of nodes and ranks; return what `state` lacks."""
        parts = _parts(state) if isinstance(state, Mapping) else None
        if parts is None:
            if os.path.isdir(path):
                raise CheckpointError(
                    f"{path} is a folder, as FcdpStrategy saves it, which loads into a sharded model only; "
                    'call fabric.load(path, {"model": model, …}) after fabric.setup'
                )
            return super().load_checkpoint(path, state, strict, *args, **options)
        takers = {k: v for k, v in parts.rest.items() if hasattr(v, "load_state_dict")}
        extra = load(path, parts.model, optimizer=parts.optimizer, extra=takers).extra
        loaded = extra if isinstance(extra, dict) else {}  # `fcdp_compile.save` takes any tree
        if strict and (missing := [k for k in parts.rest if k not in loaded]):
            raise CheckpointError(
                f"{path} has no {missing[0]!r}; leave it out, or give strict=False"
            )
        state.update({k: v for k, v in loaded.items() if k in parts.rest and k not in takers})
        return {k: v for k, v in loaded.items() if k not in state}


class _NoSync:
    """What `fabric.no_backward_sync` calls."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return no_sync(module) if enabled else nullcontext()


class _Parts(NamedTuple):
    """The parts of a state that Fabric saves or loads; rest: what is neither sharded nor an optimizer."""

    model: nn.Module
    optimizer: Optimizer | None
    rest: dict[str, Any]


def _parts(state: Mapping[str, Any]) -> _Parts | None:
    """Take a state apart; None if it has no sharded model."""
    models = {k: v for k, v in state.items() if is_sharded(v)}
    optimizers = {k: v for k, v in state.items() if isinstance(v, Optimizer)}
    if not models:
        return None
    if len(models) > 1 or len(optimizers) > 1:
        raise CheckpointError(
            f"the state has {', '.join(map(repr, [*models, *optimizers]))}, but a folder holds one sharded "
            "model and one optimizer; save each model with its optimizer to a folder of its own"
        )
    rest = {k: v for k, v in state.items() if k not in models and k not in optimizers}
    return _Parts(next(iter(models.values())), next(iter(optimizers.values()), None), rest)
