"""Cut a run of compute nodes such that the layers of a model become equal segments."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import accumulate, pairwise

from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from fcdp_compile.passes.graph.repetition import Repetition, stretches

_MIN_NODES = 16
"""The fewest nodes of a segment cut out of a run: its call takes about 10 us on the Python thread."""

_MIN_SEGMENTS = 3
"""Fewer equal segments save no compiling: the nodes before and after them are compiled, too."""


def cut_layers(run: Sequence[Node]) -> list[list[Node]]:
    """Cut a run of compute nodes at the same place in each of the layers it holds.

        embedding n a m n a m n a m n a m head   ->   embedding n | a m n | a m n | a m n | a m head

    A layer is a part that repeats in the sequence of nodes, with equal ops, constants and shapes of results.
    The cut is where the fewest values cross it, at the residual stream: a value that crosses is written to
    memory and read again.

    Requires: nodes in an order that can run.
    Returns the pieces; joined in order they are the run.
    """
    if len(run) < _MIN_SEGMENTS * _MIN_NODES:
        return [list(run)] if run else []
    borders = {0, len(run)}
    crossing = _crossing(run)
    for stretch in stretches([_kind(n) for n in run]):
        # One op many times is not a layer.
        if isinstance(stretch, Repetition) and stretch.period > 1:
            borders.update(_borders(stretch, crossing))
    return [list(run[a:b]) for a, b in pairwise(sorted(borders))]


def _borders(repeated: Repetition, crossing: list[int]) -> list[int]:
    together = -(-_MIN_NODES // repeated.period)
    length = repeated.period * together
    first = min(
        range(repeated.start, repeated.start + repeated.period),
        key=lambda b: (sum(crossing[b : repeated.stop : length]), b),
    )
    borders = list(range(first, repeated.stop + 1, length))
    return borders if len(borders) > _MIN_SEGMENTS else []


def _crossing(run: Sequence[Node]) -> list[int]:
    """For each border, how many values cross it; values that are also used outside of the run don't count."""
    place = {node: i for i, node in enumerate(run)}
    changes = [0] * (len(run) + 1)
    for i, node in enumerate(run):
        uses = [place.get(user, len(run)) for user in node.users]
        last = max(uses, default=i)
        if i < last < len(run):
            changes[i + 1] += 1
            changes[last + 1] -= 1
    return list(accumulate(changes))


def _kind(node: Node) -> Hashable:
    constants = map_arg((node.args, node.kwargs), lambda n: None)
    return node.target, str(constants), _described(node.meta.get("val"))


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.stride()}"
    return type(value).__name__
