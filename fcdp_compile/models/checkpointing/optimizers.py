"""An optimizer as values and cut tensors under its parameters' names, and back.

    state_dict(): {"state": {0: {"step", "exp_avg"}}, "param_groups": [{"lr", "params": [0]}], …}
    ->  groups [{"lr", "params": ["norm.weight"]}]
        state {"norm.weight": {"step", "exp_avg": TensorReference}}

If one more parameter were frozen, indices would name other parameters; names do not change.  A tensor of the
optimizer that is cut as its parameter is, such as a moment, is written by rows and loads on any layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fcdp_compile.core.params.registry import ParamSpec
from fcdp_compile.errors import CheckpointError
from fcdp_compile.models.checkpointing.format.tree import TensorReference
from fcdp_compile.optimizers.offload import Offloaded
from fcdp_compile.torch_compat import is_wrapper_subclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """This rank's rows of a parameter, or of a tensor of the optimizer that is cut as its parameter is."""

    name: str
    spec: ParamSpec
    local: Tensor


def parts_of(
    optimizer: Optimizer, names: Mapping[int, str], specs: Mapping[str, ParamSpec]
) -> tuple[dict[str, Any], list[Moment]]:
    """Take an optimizer's state dict apart, by names of parameters.

    names: of the model's parameters, by id.  specs: of its sharded parameters, by name.

    Returns the moments, and these values: "optimizer.class"; "optimizer.groups", the parameter groups with
    names in place of parameters; "optimizer.state", the state by parameter and key, with a TensorReference in
    place of each moment; "optimizer.others", the rest of the state dict.

    Raises: CheckpointError if the optimizer has a parameter that is not the model's, or a tensor that is cut
    in another way than its parameter.
    """
    whole = optimizer.state_dict()
    by_index = dict(_numbered(optimizer, whole, names))
    groups = [
        {**group, "params": [by_index[i][0] for i in group["params"]]}
        for group in whole["param_groups"]
    ]
    state: dict[str, dict[str, Any]] = {}
    moments: list[Moment] = []
    keys = _moment_keys(whole["state"], by_index)
    for index, of_one in whole["state"].items():
        if index not in by_index:
            continue
        name, parameter = by_index[index]
        state[name] = dict(of_one)
        for key, value in of_one.items():
            where = f"optimizer.state[{name!r}][{key!r}]"
            if name in specs and _is_moment(parameter, key, value, keys, where):
                local = value.to_local() if isinstance(value, DTensor) else value
                if is_wrapper_subclass(local):
                    raise CheckpointError(
                        f"{where} is quantised ({type(local).__name__}), in blocks of this rank's rows, "
                        "which another number of ranks cannot read; save the model alone, or use an "
                        "optimizer whose states are plain tensors"
                    )
                state[name][key] = TensorReference(where)
                moments.append(Moment(name=where, spec=specs[name], local=local.detach()))
    others = {k: v for k, v in whole.items() if k not in ("state", "param_groups")}
    if of_none := {k: v for k, v in whole["state"].items() if k not in by_index}:
        others["state"] = of_none
    parts = {"class": class_of(optimizer), "groups": groups, "state": state, "others": others}
    return {f"optimizer.{name}": part for name, part in parts.items()}, moments


def class_of(optimizer: Optimizer) -> str:
    """The name of an optimizer's class, without a wrapper such as Accelerate's or `offload`'s."""
    is_ours = isinstance(optimizer, Offloaded)
    inner = getattr(optimizer, "inner" if is_ours else "optimizer", None)
    return class_of(inner) if isinstance(inner, Optimizer) else type(optimizer).__qualname__


def _numbered(
    optimizer: Optimizer, whole: Mapping[str, Any], names: Mapping[int, str]
) -> Iterator[tuple[int, tuple[str, nn.Parameter]]]:
    """Yield each parameter's number in the state dict, with its name and the parameter."""
    for group, saved in zip(optimizer.param_groups, whole["param_groups"], strict=True):
        for index, parameter in zip(saved["params"], group["params"], strict=True):
            if id(parameter) not in names:
                raise CheckpointError(
                    f"the optimizer steps a parameter of shape {tuple(parameter.shape)} that is not the "
                    "model's; build the optimizer from the parameters of the sharded model"
                )
            yield index, (names[id(parameter)], parameter)


def _moment_keys(
    state: Mapping[Any, Any], by_index: Mapping[int, tuple[str, nn.Parameter]]
) -> set[str]:
    """Return the keys that hold tensors of the parameter's shape, judged by parameters that are not scalars.

    A scalar cannot tell: its step count has its shape as well.
    """
    return {
        key
        for index, of_one in state.items()
        if index in by_index and by_index[index][1].dim()
        for key, value in of_one.items()
        if isinstance(value, Tensor) and value.shape == by_index[index][1].shape
    }


def _is_moment(
    parameter: nn.Parameter, key: str, value: object, keys: set[str], where: str
) -> bool:
    if isinstance(value, DTensor):
        lies_alike = (
            isinstance(parameter, DTensor)
            and value.shape == parameter.shape
            and value.device_mesh == parameter.device_mesh
            and tuple(value.placements) == tuple(parameter.placements)
        )
        if not lies_alike:
            raise CheckpointError(
                f"{where} is cut as {tuple(value.placements)} with shape {tuple(value.shape)}, but its "
                "parameter in another way; fcdp_compile.save takes only optimizers whose tensors are "
                "cut like their parameters"
            )
        return True
    if isinstance(parameter, DTensor) or not isinstance(value, Tensor):
        return False
    return value.shape == parameter.shape and (parameter.dim() > 0 or key in keys)


def check_groups(
    optimizer: Optimizer, saved: list[dict[str, Any]], names: Mapping[int, str]
) -> None:
    """Make sure that an optimizer's groups have the parameters that were saved.

    Raises: CheckpointError, naming the first that differ.
    """
    groups = list(optimizer.param_groups)
    if len(groups) != len(saved):
        raise CheckpointError(
            f"the optimizer has {len(groups)} groups of parameters and the checkpoint {len(saved)}; build it "
            "with the same groups as when it was saved"
        )
    for i, (group, other) in enumerate(zip(groups, saved, strict=True)):
        now = [names.get(id(p), "of another model") for p in group["params"]]
        if sorted(now) != sorted(other["params"]):
            more = sorted(set(now) - set(other["params"]))[:3]
            gone = sorted(set(other["params"]) - set(now))[:3]
            raise CheckpointError(
                f"group {i} of the optimizer has other parameters than the checkpoint's: it has "
                f"{more or 'none'} in addition, and lacks {gone or 'none'}; build it with the same groups, "
                "and with the same parameters frozen, as when it was saved"
            )


def put_back(
    optimizer: Optimizer,
    groups: list[dict[str, Any]],
    state: Mapping[str, Mapping[str, Any]],
    others: Mapping[str, Any],
    names: Mapping[int, str],
) -> None:
    """Load saved parts (`parts_of`) into the optimizer.

    The caller has already replaced each TensorReference by its tensor and called `check_groups`.
    """
    # A state dict numbers the parameters in the order of this optimizer.
    numbers: dict[str, int] = {}
    packed = []
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        here = [names[id(p)] for p in group["params"]]
        numbers |= {name: len(numbers) + i for i, name in enumerate(here)}
        packed.append({**saved, "params": [numbers[name] for name in here]})
        if "param_names" in group:  # in this optimizer's order, not in the saved order
            packed[-1]["param_names"] = group["param_names"]
    others = dict(others)
    of_none = others.pop("state", {})
    by_number = {numbers[name]: dict(of_one) for name, of_one in state.items()}
    optimizer.load_state_dict({**others, "state": {**by_number, **of_none}, "param_groups": packed})
    _restore_dtypes(optimizer, state, names)


def _restore_dtypes(
    optimizer: Optimizer, state: Mapping[str, Mapping[str, Any]], names: Mapping[int, str]
) -> None:
    """Undo the casts of `load_state_dict`, which gives state its parameter's dtype."""
    for parameter in (p for g in optimizer.param_groups for p in g["params"]):
        now = optimizer.state.get(parameter, {})
        for key, value in state.get(names[id(parameter)], {}).items():
            cast = now.get(key)
            if isinstance(value, Tensor) and isinstance(cast, Tensor) and cast.dtype != value.dtype:
                with torch.no_grad():
                    now[key] = value.to(cast.device)
