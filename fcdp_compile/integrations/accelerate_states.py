"""What `save_state` of Accelerate saves in fcdp's own format: each trained model, with its optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from fcdp_compile.errors import ArgumentError
from fcdp_compile.sharding.shard import model_of

FOLDER = "fcdp"
"""The folder within a saved state that `fcdp_compile.save` writes."""


def folder_of(folder: str, i: int) -> Path:
    """The folder of the i-th model within a saved state."""
    return Path(folder, FOLDER if i == 0 else f"{FOLDER}_{i}")


def states_of(
    models: Iterable[nn.Module], optimizers: Iterable[Any]
) -> list[tuple[nn.Module, Optimizer | None]]:
    """The models with parameters that are trained, each with its optimizer.

    Raises: ArgumentError if a model has several optimizers, or an optimizer several models.
    """
    bare: list[Any] = [getattr(o, "optimizer", o) for o in optimizers]
    found: list[tuple[nn.Module, Optimizer | None]] = []
    taken: set[int] = set()
    for root in dict.fromkeys(model_of(m) for m in models):
        own = {id(p) for p in root.parameters() if p.requires_grad}
        having = [o for o in bare if any(id(p) in own for g in o.param_groups for p in g["params"])]
        if len(having) > 1:
            raise ArgumentError(
                f"{len(having)} optimizers train one model, but a saved state has one for each model; "
                "give all its parameters to one optimizer"
            )
        if any(id(o) in taken for o in having):
            raise ArgumentError(
                "one optimizer trains several models, but a saved state has one for each model; give "
                "each model an optimizer of its own"
            )
        taken.update(map(id, having))
        if own:
            found.append((root, having[0] if having else None))
    return found
