"""With dropout, the model draws the same random numbers as under torch's own `aot_eager`."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import GraphModule

from fcdp_compile.backend.compute import BoxedCallable, Compute
from tests.distributed import graph_safe
from tests.distributed.parity import (
    GRADIENT_FLOOR,
    PARAMETER_FLOOR,
    RELATIVE,
    Sharded,
    Trial,
    adamw,
    check_close,
    gradients,
    values,
)
from tests.distributed.ranks import run

pytestmark = [pytest.mark.distributed, pytest.mark.rare]


def _check(mesh: DeviceMesh | None, is_checkpointed: bool, steps: int = 8) -> None:
    mine = Sharded(mesh, Trial(case="gpt2-dropout", is_checkpointed=is_checkpointed))
    plain = mine.plain
    compiled = torch.compile(plain, backend="aot_eager")
    optimizer = adamw(plain)
    for step in range(steps):
        ids = mine.batches(step)[mine.rank]
        losses = []
        for net in (compiled, mine.net):
            # Only the forward's seed is set: a backward that recomputes must restore the state by itself.
            torch.manual_seed(100 * step + mine.rank)
            loss = mine.case.loss(net, ids)  # type: ignore[arg-type]
            torch.manual_seed(12345)
            loss.backward()
            losses.append(loss.item())
        for parameter in plain.parameters():
            if mine.ranks > 1 and parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= mine.ranks
        about = f"checkpointed={is_checkpointed}, step {step}"
        assert abs(losses[1] - losses[0]) <= RELATIVE * abs(losses[0]), f"{about}: {losses}"
        check_close(about, gradients(mine.model), gradients(plain), floor=GRADIENT_FLOOR)
        mine.step()
        optimizer.step()
        optimizer.zero_grad()
    check_close("at last", values(mine.model), values(plain), floor=PARAMETER_FLOOR)
    _check_that_dropout_drops(mine, ids)


def _check_that_dropout_drops(mine: Sharded, ids: torch.Tensor) -> None:
    """The control: another seed gives another loss."""
    losses = set()
    for seed in (1, 2):
        torch.manual_seed(seed)
        losses.add(mine.loss(ids).item())
    assert len(losses) == 2


@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["kept", "checkpointed"])
def test_one_process(is_checkpointed: bool) -> None:
    _check(None, is_checkpointed)


def _check_both_ways_to_recompute(mesh: DeviceMesh) -> bool:
    """Check as on CPUs, where graphs take random states, and as on GPUs, where they take generators.

    Returns whether this torch can take generators on a CPU.
    """
    compiled: list[int] = []

    def count(compute: Compute, gm: GraphModule) -> BoxedCallable:
        compiled[-1] += 1
        return compile_segment(compute, gm)

    compile_segment = Compute._compile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Compute, "_compile", count)
        compiled.append(0)
        _check(mesh, True)
        if not graph_safe.is_possible():
            return False
        generator = graph_safe.enable()
        compiled.append(0)
        _check(mesh, True, steps=3)
    assert generator.switches > 0
    assert compiled[0] == compiled[1], f"equal layers are compiled once: {compiled}"
    return True


def test_two_nodes() -> None:
    """Nodes of one rank: more ranks would only add gathers within a node, which draw no random numbers."""
    if not all(run(_check_both_ways_to_recompute, nodes=2, ranks_per_node=1)):
        pytest.skip("without generators as inputs, which this torch has for GPUs alone")
