"""Trace a model whose ranks share sequences or parameters, without other ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fcdp_compile.errors import FcdpError
from fcdp_compile.params.mesh import make_mesh, topology_of
from fcdp_compile.ranks.inner_mesh import data_mesh
from fcdp_compile.torch_compat import start_fake_group


@contextmanager
def inner_mesh(cp: int, tp: int) -> Iterator[DeviceMesh | None]:
    """The first rank's mesh of cp x tp ranks that do not exist; None for one rank.

    Raises: FcdpError in a process that has process groups.
    """
    if cp * tp == 1:
        yield None
        return
    if dist.is_initialized():
        raise FcdpError(
            "cp and tp cannot be planned in a process of a running job; use `fcdp plan`"
        )
    start_fake_group(cp * tp)
    try:
        mesh = make_mesh(1, cp=cp, tp=tp)
        assert mesh is not None, "several ranks have one"
        topology_of(data_mesh(mesh))  # now: it reads tensors, which will be fake
        yield mesh
    finally:
        dist.destroy_process_group()


def first_part(
    inputs: Mapping[str, Tensor] | Sequence[Tensor], cp: int
) -> Mapping[str, Any] | Sequence[Tensor]:
    """The inputs of the first rank of those that share sequences, as `sequence_part` gives them.

    Raises: FcdpError for inputs other than tokens and labels.
    """
    if cp == 1:
        return inputs
    if not isinstance(inputs, Mapping) or set(inputs) != {"input_ids", "labels"}:
        raise FcdpError(
            "sequences can be cut for models whose inputs are input_ids and labels; leave out --cp"
        )
    ids = inputs["input_ids"]
    if ids.shape[1] % cp:
        raise FcdpError(f"--cp {cp} does not divide the {ids.shape[1]} tokens of --seq")
    part = torch.zeros_like(ids[:, : ids.shape[1] // cp])
    return {
        "input_ids": part,
        "labels": part.clone(),
        "shift_labels": part.clone(),
        "position_ids": part.clone(),
        "sequence_ids": None,
        "only_trailing": True,
    }
