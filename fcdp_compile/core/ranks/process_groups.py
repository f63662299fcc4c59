"""Make process groups for a part of a job's ranks, and choose their timeouts."""

from __future__ import annotations

import contextlib
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.constants import default_pg_nccl_timeout

from fcdp_compile.core.ranks.lost_ranks import world
from fcdp_compile.errors import ArgumentError
from fcdp_compile.torch_compat.distributed import gloo_timeout, nccl_timeout, without_splitting


def group_of(ranks: list[int], timeout: timedelta | None, backend: str | None) -> dist.ProcessGroup:
    """Make a new group; only its own ranks need to call this."""
    # If the default group is bound to a device, torch splits its communicator, which is a collective of all
    # ranks: a part of the ranks would wait for the others for ever.
    is_part = len(ranks) < dist.get_world_size()
    with without_splitting(world()) if is_part else contextlib.nullcontext():
        group: dist.ProcessGroup = dist.new_group(
            ranks, timeout=timeout, backend=backend, use_local_synchronization=True
        )
    return group


def checked_timeout(timeout: timedelta | float | None) -> timedelta | None:
    """Check a timeout that was given to `make_mesh`.

    Raises: TypeError or ValueError if it is not a timeout.
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
    """The timeout of groups that fcdp makes: the one given to make_mesh, else the default group's.

    None: torch's own default.  If the default group has only NCCL, with NCCL's default timeout, new groups
    take torch's default too, because torch lets Gloo groups wait longer.
    """
    if chosen is not None:
        return chosen
    default = world()
    if (gloo := gloo_timeout(default)) is not None:
        return gloo
    nccl = nccl_timeout(default)
    return None if nccl == default_pg_nccl_timeout else nccl


def cpu_backend() -> str:
    """The backend of groups for CPU tensors: the default group's CPU backend, or Gloo if it has none."""
    pairs = (pair.split(":") for pair in dist.get_backend_config().split(","))
    return dict(pairs).get("cpu", "gloo")
