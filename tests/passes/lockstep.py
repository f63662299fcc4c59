"""Run lowered graphs of all ranks in one process, in lockstep, with collectives made of `torch.cat`.

The interpreter shares no code with the runtime.  It checks that all ranks run the same collectives, that
every pending step is waited for once, and that no freed buffer is read: `free` fills buffers with nonsense.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fcdp_compile import ops

Call = tuple[Any, int, Tensor]
_NONSENSE = 1e30


class Pending:
    """The result of a started step: compute must wait for it, other lanes may take it without a wait."""

    def __init__(self, result: Tensor, *after: object) -> None:
        self.result = result
        self._after = [a for a in after if isinstance(a, Pending)]
        self.is_waited = False

    def wait(self) -> Tensor:
        assert not self.is_waited, "waited for twice"
        self._note_wait()
        return self.result

    def _note_wait(self) -> None:
        self.is_waited = True
        for step in self._after:  # its inputs are done before it
            step._note_wait()


def _tensor(value: Tensor | Pending) -> Tensor:
    return value.result if isinstance(value, Pending) else value


@dataclass(slots=True)
class Rank:
    """One rank's state between graphs: node shards by bucket, gradients by parameters, a log of its steps."""

    cache: dict[int, Tensor] = field(default_factory=dict)
    gradients: dict[tuple[str, ...], Tensor] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)


def run(
    graphs: Sequence[GraphModule],
    args: Sequence[list[Any]],
    memories: Sequence[Rank],
    *,
    nodes: int,
    ranks_per_node: int,
) -> list[tuple[Any, ...]]:
    """Run one graph on each rank; ranks are numbered n * g + l."""
    running = [_steps(*each) for each in zip(graphs, args, memories, strict=True)]
    results: list[Any] = [None] * len(running)
    inbox: list[Tensor | None] = [None] * len(running)
    while True:
        sent: list[Call | None] = []
        for i, rank in enumerate(running):
            try:
                sent.append(rank.send(inbox[i]))
            except StopIteration as stop:
                sent.append(None)
                results[i] = stop.value
        if not any(sent):
            return results
        assert all(sent), "a rank finished while others communicate"
        (step,) = {s[:2] for s in sent if s}
        inbox = _exchange(step[0], [s[2] for s in sent if s], nodes, ranks_per_node)


def _exchange(op: Any, sent: list[Tensor], nodes: int, per_node: int) -> list[Tensor | None]:
    received: list[Tensor | None] = [None] * len(sent)
    groups = [[n * per_node + p for p in range(per_node)] for n in range(nodes)]
    if op in (ops.inter_all_gather, ops.inter_reduce_scatter):
        groups = [[n * per_node + p for n in range(nodes)] for p in range(per_node)]
    for group in groups:
        parts = [sent[r] for r in group]
        for position, r in enumerate(group):
            if "gather" in op.__name__:
                received[r] = torch.cat(parts)
            else:
                mean = torch.stack(parts).sum(0) / len(parts)
                received[r] = mean.view(len(parts), -1)[position].to(parts[0].dtype)
    return received


def _steps(gm: GraphModule, args: list[Any], rank: Rank) -> Generator[Call, Tensor, Any]:
    inputs = iter(args)
    env: dict[Node, Any] = {}
    untouchable = {a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor)}
    pending: list[Pending] = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            env[node] = next(inputs)
            continue
        if node.op == "get_attr":
            env[node] = getattr(gm, node.target)
            continue
        given, kwargs = map_arg((node.args, node.kwargs), env.__getitem__)
        if node.op == "output":
            assert all(p.is_waited for p in pending), "a step was never waited for"
            return given[0]
        if node.op == "call_module":
            env[node] = gm.get_submodule(node.target)(*given)
            continue
        if node.target in ops.EXPLICIT:
            rank.done.append(node.target.__name__)
        if node.target is ops.wait:
            env[node] = given[0].wait()
        elif node.target is ops.free:
            for full in given:
                if full.untyped_storage().data_ptr() not in untouchable:
                    full.fill_(_NONSENSE)
        elif node.target is ops.store:
            rank.cache[kwargs["bucket"]] = _tensor(given[0]).clone()
            pending.append(Pending(_tensor(given[0]), *given))
            env[node] = pending[-1]
        elif node.target is ops.load:
            pending.append(Pending(rank.cache[kwargs["bucket"]].clone()))
            env[node] = pending[-1]
        elif node.target is ops.collect:
            waiting = rank.gradients.pop(kwargs["params"], torch.zeros(()))
            total = (_tensor(given[0]) + waiting).to(node.meta["val"].dtype)
            pending.append(Pending(total, *given))
            env[node] = pending[-1]
        elif node.target is ops.accumulate:
            rank.gradients[kwargs["params"]] = _tensor(given[0]).clone()
            pending.append(Pending(_tensor(given[0]), *given))
            env[node] = pending[-1]
        elif node.target is ops.stamp:
            env[node] = torch.tensor(given[0])
        elif node.target is ops.check:
            assert given[0].tolist() == list(given[1])
        elif node.target in ops.EXPLICIT:
            received = yield node.target, kwargs["bucket"], _tensor(given[0]).clone()
            if node.target is ops.intra_rest_all_gather:
                _check_own(received, *map(_tensor, given))
            pending.append(Pending(received, *given))
            env[node] = pending[-1]
        else:
            assert not any(isinstance(g, Pending) for g in given), f"{node} did not wait"
            env[node] = node.target(*given, **kwargs)


def _check_own(full: Tensor, node_shard: Tensor, own: Tensor) -> None:
    """A node's own home shards must be one column of the full parameters."""
    if not full.numel():
        return
    per_node = full.numel() // node_shard.numel()
    columns = full.view(per_node, -1, own.numel() // per_node).unbind(1)
    assert any(torch.equal(own.view(per_node, -1), c) for c in columns)


def cut(full: Tensor, dim: int | None, nodes: int, per_node: int) -> list[Tensor]:
    """The home shards of every rank n * g + l: split over places, then over nodes, by torch.chunk's rule."""
    if dim is None:
        return [full.clone() for _ in range(nodes * per_node)]

    def pieces(tensor: Tensor, count: int) -> list[Tensor]:
        size = max(1, math.ceil(tensor.shape[dim] / count))
        bounds = [min(i * size, tensor.shape[dim]) for i in range(count + 1)]
        return [tensor.narrow(dim, a, b - a) for a, b in pairwise(bounds)]

    by_place = [pieces(p, nodes) for p in pieces(full, per_node)]
    return [by_place[p][n].clone() for n in range(nodes) for p in range(per_node)]
