"""Make process groups for a part of a job's ranks, and say how long they wait."""

from __future__ import annotations

import contextlib
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.constants import default_pg_nccl_timeout

from fcdp_compile.errors import ArgumentError
from fcdp_compile.ranks.lost_ranks import world
from fcdp_compile.torch_compat import gloo_timeout, nccl_timeout, without_splitting


def group_of(ranks: list[int], timeout: timedelta | None, backend: str | None) -> dist.ProcessGroup:
    """A new group, which these ranks make and no others need to know of."""
    # Splitting off the communicator of all ranks is a collective of all ranks: with a default group that is
    # bound to a device, those of a part of the world would wait for the others for ever.
    is_part = len(ranks) < dist.get_world_size()
    with without_splitting(world()) if is_part else contextlib.nullcontext():
        group: dist.ProcessGroup = dist.new_group(
            ranks, timeout=timeout, backend=backend, use_local_synchronization=True
        )
    return group


def checked_timeout(timeout: timedelta | float | None) -> timedelta | None:
    """A timeout as it was given to `make_mesh`.

    Raises: TypeError or ValueError if it is none.
    """
    if timeout is None or isinstance(timeout, timedelta):
        chosen = timeout
    elif isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise ArgumentError(f"timeout must be seconds or a timedelta, not {timeout!r}")
    else:
        chosen = timedelta(seconds=timeout)
    if chosen is not None and chosen <= timedelta(0):
        raise ArgumentError(f"timeout must be longer than 0 s, not {timeout!r}")
    return chosen


def timeout_of_new_groups(chosen: timedelta | None) -> timedelta | None:
    """The timeout of groups that fcdp makes: the one given to make_mesh, else the default group's."""
    default = world()
    return timeout_like(
        chosen,
        gloo=gloo_timeout(default),
        nccl=nccl_timeout(default),
        nccl_default=default_pg_nccl_timeout,
    )


def timeout_like(
    chosen: timedelta | None,
    *,
    gloo: timedelta | None,
    nccl: timedelta | None,
    nccl_default: timedelta | None,
) -> timedelta | None:
    """The timeout that groups should have beside a default group with these; None: torch's own default.

    A default group of NCCL alone whose timeout nobody chose says nothing about Gloo groups, which torch lets
    wait longer.
    """
    if chosen is not None:
        return chosen
    if gloo is not None:
        return gloo
    return None if nccl == nccl_default else nccl


def cpu_backend() -> str:
    """The backend of groups for CPU tensors: the default group's, or Gloo where it has none for them."""
    pairs = (pair.split(":") for pair in dist.get_backend_config().split(","))
    return dict(pairs).get("cpu", "gloo")
