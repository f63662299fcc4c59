"""Saves and loads for `fabric`: `fabric.save` and `fabric.load` of a sharded model are fcdp's own.

fabric.save("last", {"model": model, "optimizer": optimizer, "step": step})    # a folder
fabric.load("last", state)                                        # on any number of nodes and ranks
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from lightning_fabric.strategies.ddp import DDPStrategy
from torch import nn
from torch.optim import Optimizer

from fcdp_compile.checkpointing.loading import load
from fcdp_compile.checkpointing.saving import save
from fcdp_compile.errors import CheckpointError
from fcdp_compile.sharding.shard import is_sharded


class FabricCheckpoints(DDPStrategy):
    """The part of `FcdpStrategy` that saves and loads; all ranks must call its methods."""

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
