"""`PipelineStage`: a stage of torch's pipelines that fcdp has sharded.

    micro-batch          0      1      2      3 (the last)
    forward        gather/load  load   load   load           each node shard crosses between nodes once
    backward       accumulate  accum. accum. collect         so does each sum of gradients

A schedule runs forwards before the backwards of earlier micro-batches.  Whether a backward accumulates is
fixed in its forward (`passes.stamp`), so it is enough to know the last micro-batch there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.pipelining as pipelining
from torch import nn

from fcdp_compile.core.params.mesh import Topology
from fcdp_compile.core.ranks.inner_mesh import PP
from fcdp_compile.core.sharding.no_sync import no_sync
from fcdp_compile.core.sharding.shard import mesh_of, state_of
from fcdp_compile.errors import ArgumentError, FcdpError


class PipelineStage(pipelining.PipelineStage):
    """torch's `PipelineStage` for a model that `shard` has sharded over the ranks of a stage.

        mesh = fcdp_compile.make_mesh(pp=2)
        index = mesh.get_local_rank("pp")
        model = fcdp_compile.shard(parts[index], mesh)
        stage = fcdp_compile.PipelineStage(torch.compile(model, backend="fcdp"), index, 2)
        schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=loss)

    Micro-batches of one step gather parameters between nodes once and reduce gradients between nodes once, if
    the strategy keeps copies and accumulates gradients (`no_sync`).  The schedule must run whole backwards in
    the order of micro-batches, as GPipe, 1F1B and interleaved 1F1B do; others are refused in their first
    backward.

    submodule: sharded, compiled or not.
    device: where the stage's tensors are; by default the device that the model computes on.
    group: ranks of all stages that send each other tensors; by default the "pp" group of the model's mesh.
    options: as for torch's class.

    Raises: ArgumentError if the model is not sharded, or if it is sharded over ranks of other stages.
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        state, mesh = state_of(submodule), mesh_of(submodule)
        if group is None and mesh is not None and PP in (mesh.mesh_dim_names or ()):
            group = mesh.get_group(PP)
        _check_ranks(state.topology, group)
        device = device or state.device.torch
        super().__init__(submodule, stage_index, num_stages, device, group=group, **options)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of one micro-batch; the last one's backward will synchronise gradients."""
        is_last = not self.has_backward or self._is_last(fwd_chunk_id)
        with self._synchronising(is_last=is_last), _own_errors():
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Run the backward of one micro-batch.

        Raises: ArgumentError if the schedule cuts backwards in two, or runs the last micro-batch's earlier.
        """
        if not self.has_backward:  # schedules call it in `eval`, too
            return
        if not full_backward:
            raise ArgumentError(
                "this schedule computes gradients of inputs and of weights apart, but a graph that fcdp "
                "compiled computes both together; use ScheduleGPipe, Schedule1F1B or "
                "ScheduleInterleaved1F1B"
            )
        if last_backward != self._is_last(bwd_chunk_id):
            raise ArgumentError(
                "this schedule does not run backwards in the order of micro-batches; use ScheduleGPipe, "
                "Schedule1F1B or ScheduleInterleaved1F1B"
            )
        # Forwards that a backward repeats (activation checkpointing) must decide as they did before.
        with self._synchronising(is_last=last_backward), _own_errors():
            super().backward_one_chunk(bwd_chunk_id, loss=loss, last_backward=last_backward)

    def _is_last(self, chunk: int) -> bool:
        return self.chunks is not None and chunk == self.chunks - 1

    def _synchronising(self, *, is_last: bool) -> AbstractContextManager[None]:
        return nullcontext() if is_last else no_sync(self.submod)


@contextmanager
def _own_errors() -> Iterator[None]:
    """Raise fcdp's errors as they are: torch wraps what a micro-batch raises, and describes its tensors."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__cause__, FcdpError):
            raise error.__cause__ from error.__cause__.__cause__
        raise


def _check_ranks(topology: Topology, group: dist.ProcessGroup | None) -> None:
    """Refuse a model that shares its ranks with other stages: values of one would replace the other's."""
    if topology.control is None:
        return
    of_model = dist.get_process_group_ranks(topology.control)
    of_pipeline = dist.get_process_group_ranks(group or dist.group.WORLD)
    if others := sorted({*of_model} & {*of_pipeline} - {dist.get_rank()}):
        raise ArgumentError(
            f"the model of this stage is sharded over ranks {of_model}, but rank {others[0]} belongs to "
            "another stage of the pipeline; shard the model over fcdp_compile.make_mesh(pp=…)"
        )
