"""Gives an optimizer that was built before `shard` the sharded parameters.

Scripts for Accelerate and Fabric build the optimizer first and hand it over together with the model, so the
optimizer holds parameters that `shard` replaces:

    with sharded_within(optimizers, model):
        fcdp_compile.shard(model, mesh)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import nn
from torch.optim import Optimizer

from fcdp_compile.core.sharding.shard import is_sharded, model_of
from fcdp_compile.errors import ArgumentError


@contextmanager
def sharded_within(optimizers: Sequence[Optimizer], *models: nn.Module) -> Iterator[None]:
    """Give the optimizers the sharded parameters of models that are sharded within the block.

    Models that are sharded already are left alone.

    Raises: ArgumentError on entering, for an optimizer that has states of parameters to be replaced.
    """
    roots = [model_of(m) for m in models if not is_sharded(m)]
    before = {root: dict(root.named_parameters()) for root in roots}
    for optimizer in optimizers:
        for parameters in before.values():
            _check_without_state(optimizer, parameters)
    yield
    for optimizer in optimizers:
        for root, parameters in before.items():
            _hold_sharded(optimizer, root, parameters)


def _check_without_state(optimizer: Optimizer, before: Mapping[str, nn.Parameter]) -> None:
    for name, parameter in before.items():
        if optimizer.state.get(parameter):
            raise ArgumentError(
                f"{type(optimizer).__name__} has a state of parameter {name!r}, which sharding replaces, so "
                "the state would be lost; build the optimizer from the parameters of the sharded model, and "
                "load its state afterwards"
            )


def _hold_sharded(
    optimizer: Optimizer, model: nn.Module, before: Mapping[str, nn.Parameter]
) -> None:
    """Replace the parameters in an optimizer's groups by the sharded ones.

    The groups, their order and their options stay, and so do parameters of other models.  A quantised weight
    leaves its group: it is frozen, and `shard` has made several tensors of it.

    optimizer: torch's own, without a wrapper.
    before: the model's parameters by name, from before `shard`.
    """
    now = dict(model.named_parameters())
    sharded = {id(p): now.get(name) for name, p in before.items()}
    for group in optimizer.param_groups:
        held = [(at, sharded.get(id(p), p)) for at, p in enumerate(group["params"])]
        kept = [(at, p) for at, p in held if p is not None]
        if "param_names" in group:
            group["param_names"] = [group["param_names"][at] for at, _ in kept]
        # In place, because some optimizers, such as LBFGS, keep the list.
        group["params"][:] = [p for _, p in kept]
