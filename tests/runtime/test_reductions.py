"""What arrives: the parts of a gather in their places, sums of gradients rounded once per level."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fcdp_compile.core.params.packing import is_narrow
from fcdp_compile.devices import Cpu
from fcdp_compile.runtime.collectives import bodies, channel
from fcdp_compile.runtime.collectives.channel import Channel
from fcdp_compile.runtime.lanes.lanes import Scratch
from fcdp_compile.runtime.lanes.tasks import Begun

NODES, PLACES, ELEMENTS = 8, 8, 2000
ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


class OnStream(Channel):
    """A group whose collectives run on the current stream."""

    is_on_stream = True  # type: ignore[assignment]


def average(rows: Tensor, patch: pytest.MonkeyPatch) -> Tensor:
    """The result of `reduce_scatter` on the parts [size, n] that all ranks have of one rank's slot."""

    def all_to_all(out: Tensor, send: Tensor, **_: Any) -> None:
        out.copy_(rows.flatten().view(out.dtype))

    patch.setattr(dist, "all_to_all_single", all_to_all)
    out, send = torch.empty_like(rows[0]), torch.empty(rows.numel(), dtype=rows.dtype)
    wait: Any = None
    over = OnStream(None, len(rows), Cpu(), wait, Scratch(None))
    assert bodies.reduce_scatter(out, send, over) is None, "waits for nothing"
    return out


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The dtypes that NCCL's own reduce-scatter was asked for."""
    asked: list[torch.dtype] = []

    def reduce_scatter(self: Channel, out: Tensor, send: Tensor) -> None:
        asked.append(send.dtype)

    monkeypatch.setattr(Channel, "reduce_scatter", reduce_scatter)
    return asked


@pytest.mark.parametrize("dtype", ROUNDOFF, ids=str)
def test_each_level_rounds_once(
    dtype: torch.dtype, ring: list[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    grads = torch.randn(NODES, PLACES, ELEMENTS).to(dtype)
    levels = torch.stack([average(rows, monkeypatch) for rows in grads])
    found = average(levels, monkeypatch).double()
    assert ring == []
    exact, magnitude = grads.double().mean((0, 1)), grads.double().abs().mean((0, 1))
    u = ROUNDOFF[dtype]
    bound = (2 * u + u * u) * magnitude + 1e-6
    assert bool(((found - exact).abs() <= bound).all())
    by_hops = grads[0, 0]
    for row in grads.flatten(0, 1)[1:]:
        by_hops = by_hops + row  # as a ring does: it rounds to the dtype
    errors = (by_hops.double() / (NODES * PLACES) - exact).abs()
    assert errors.mean() > 2 * (found - exact).abs().mean(), "the control: rounding at every hop"


def test_what_is_wide_enough_is_left_to_nccl(
    ring: list[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    for dtype in (torch.float32, torch.float64):
        assert not is_narrow(dtype)
        average(torch.ones(2, 3, dtype=dtype), monkeypatch)
    assert ring == [torch.float32, torch.float64]


def test_gloo_leaves_the_wait_to_whoever_needs_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "finish", lambda work, group, wait: work.wait())

    def all_to_all(out: Tensor, send: Tensor, **_: Any) -> Any:
        return SimpleNamespace(wait=lambda: out.copy_(send))

    monkeypatch.setattr(dist, "all_to_all_single", all_to_all)
    out, send, wait = torch.zeros(2), torch.arange(4.0), cast(Any, None)
    left = bodies.reduce_scatter(out, send, Channel(None, 2, Cpu(), wait, Scratch(None)))
    assert isinstance(left, Begun)
    assert out.tolist() == [0.0, 0.0]
    left.finish()
    assert out.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("node", range(3))
def test_the_rest_of_a_gather_joins_what_the_node_has(node: int) -> None:
    """Of 3 nodes with 2 ranks: this node has its own home shards already."""
    full = torch.arange(2 * 3 * 4).view(2, 3, 4)  # by place, node, and element of the home shard
    sent: list[Tensor] = []

    def all_gather(out: Tensor, send: Tensor) -> None:
        sent.append(send)
        out.copy_(torch.cat([full[:, :node], full[:, node + 1 :]], dim=1).flatten())

    over: Any = SimpleNamespace(all_gather=all_gather, scratch=Scratch(None))
    out, own = torch.empty(24, dtype=full.dtype), full[:, node].flatten()
    assert bodies.gather_rest(out, full[1].flatten(), own, node, over) is None
    assert out.tolist() == full.flatten().tolist()
    (others,) = sent
    assert others.tolist() == [x for n in range(3) if n != node for x in full[1, n].tolist()]


def test_parts_of_different_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank i has sizes[i] elements; each rank sends its elements to all."""
    asked: list[tuple[Any, Any]] = []

    def all_to_all(out: Tensor, send: Tensor, **given: Any) -> None:
        asked.append((given["output_split_sizes"], given["input_split_sizes"]))
        assert send.view(torch.float32).tolist() == [1.0, 2.0] * 3

    monkeypatch.setattr(dist, "all_to_all_single", all_to_all)
    wait: Any = None
    over = OnStream(None, 3, Cpu(), wait, Scratch(None))
    assert bodies.gather_parts(torch.empty(6), torch.tensor([1.0, 2.0]), [3, 2, 1], over) is None
    assert asked == [([12, 8, 4], [8, 8, 8])]
