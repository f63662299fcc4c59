"""Gives an optimizer that was built before `shard` the sharded parameters.

Scripts for Accelerate and Fabric build the optimizer first and hand it over together with the model, so the
optimizer holds parameters that `shard` replaces:

    with sharded_within(optimizers, model):
        fcdp_compile.shard(model, mesh)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from torch.optim import Optimizer

from fcdp_compile.core.sharding.shard import is_sharded, model_of
from fcdp_compile.errors import ArgumentError


@contextmanager
def sharded_within(optimizers: Sequence[Optimizer], *models: nn.Module) -> Iterator[None]:
    """Give the optimizers the sharded parameters of models that are sharded within the block.

    Models that are sharded already are left alone.  Groups, their order and their options stay, and so do
    parameters of other models.

    Raises: ArgumentError on entering, for an optimizer that has states of parameters to be replaced.
    """
    roots = [model_of(m) for m in models if not is_sharded(m)]
    before = [(root, name, p) for root in roots for name, p in root.named_parameters()]
    for optimizer in optimizers:
        for _, name, parameter in before:
            if optimizer.state.get(parameter):
                raise ArgumentError(
                    f"{type(optimizer).__name__} has a state of parameter {name!r}, which sharding replaces, "
                    "so the state would be lost; build the optimizer from the parameters of the sharded "
                    "model, and load its state afterwards"
                )
    yield
    now = {root: dict(root.named_parameters()) for root in roots}
    sharded = {id(p): now[root].get(name) for root, name, p in before}
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        held = [(at, sharded.get(id(p), p)) for at, p in enumerate(group["params"])]
        # A quantised weight leaves the group: it is frozen, and `shard` has made several tensors of it.
        kept = [(at, p) for at, p in held if p is not None]
        if "param_names" in group:
            group["param_names"] = [group["param_names"][at] for at, _ in kept]
        # In place, because some optimizers, such as LBFGS, keep the list.
        group["params"][:] = [p for _, p in kept]
