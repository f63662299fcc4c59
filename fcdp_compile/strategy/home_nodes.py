"""Which node owns which matrix, for optimizers that need whole matrices (`layout` [Note: home nodes]).

Arithmetic only: every rank, and the planner, computes the same nodes from shapes in the model's order.
"""

from __future__ import annotations

from collections.abc import Sequence


def newton_schulz_flops(shape: Sequence[int]) -> int:
    """Floating point operations of one Newton-Schulz iteration on a matrix of this shape.

    With r the shorter side and c the longer one: X X^T (2 r r c), its square (2 r r r), their sum times X
    (2 r r c).  Source: Jordan et al., Muon, 2024.
    """
    short, long = sorted(shape)
    return 4 * short * short * long + 2 * short**3


def balanced(costs: Sequence[tuple[float, ...]], parts: int) -> list[int]:
    """The part of each item, so that no part costs much more than another in any of several costs.

    Each item goes, in order, to the part whose greatest share of a cost is smallest with it.  So items that
    follow each other are spread over the parts, too, and the parts of any run of items are nearly equal.

    costs: of each item, equally many.  Returns numbers below `parts`.
    """
    totals = [sum(of_kind) or 1.0 for of_kind in zip(*costs, strict=True)]
    taken = [[0.0] * len(totals) for _ in range(parts)]
    chosen = []
    for item in costs:
        shares = [
            sorted(
                ((t + c) / total for t, c, total in zip(row, item, totals, strict=True)),
                reverse=True,
            )
            for row in taken
        ]
        part = min(range(parts), key=lambda i: (shares[i], i))
        taken[part] = [t + c for t, c in zip(taken[part], item, strict=True)]
        chosen.append(part)
    return chosen


def home_nodes(matrices: Sequence[tuple[tuple[int, ...], int]], nodes: int) -> list[int]:
    """The home node of each matrix, balanced by bytes and by FLOPs of Newton-Schulz.

    matrices: shape and bytes per element of each, in the model's order.
    """
    costs = [
        (float(shape[0] * shape[1] * itemsize), float(newton_schulz_flops(shape)))
        for shape, itemsize in matrices
    ]
    return balanced(costs, nodes)
