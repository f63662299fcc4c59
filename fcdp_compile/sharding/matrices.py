"""The matrices of a model that may have home nodes (`params.layout` [Note: home nodes])."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from fcdp_compile.strategy.home_nodes import home_nodes


def matrices_of(root: nn.Module, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """The trainable matrices among these parameters, without embeddings.

    An embedding is used row by row, so no optimizer orthogonalises it, and often it is larger than the rest.
    """
    # Not `m.weight`, which in a sharded model gathers.
    embeddings = {
        m._parameters.get("weight") for m in root.modules() if isinstance(m, nn.Embedding)
    }
    return [p for p in parameters if p.ndim == 2 and p.requires_grad and p not in embeddings]


def home_nodes_of(matrices: Sequence[nn.Parameter], nodes: int) -> dict[nn.Parameter, int]:
    """The home node of each matrix; the same on all ranks, which have the same model."""
    sizes = [(tuple(p.shape), p.element_size()) for p in matrices]
    return dict(zip(matrices, home_nodes(sizes, nodes), strict=True))
