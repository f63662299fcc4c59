"""fcdp: sharded data parallel training for clusters with a slow network between nodes.

    mesh  = fcdp_compile.make_mesh()
    model = fcdp_compile.shard(model, mesh, strategy="fcdp")
    model = torch.compile(model, backend="fcdp")

An independent implementation of "FCDP: Fully Cached Data Parallel for Communication-Avoiding Large-Scale
Training" (Park et al.) as a torch.compile backend.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fcdp_compile.accumulation import no_sync
    from fcdp_compile.checkpointing.loading import Loaded, load
    from fcdp_compile.checkpointing.saving import PendingSave, save
    from fcdp_compile.deferred import materialize
    from fcdp_compile.errors import (
        CheckpointError,
        FcdpError,
        PlanFormatError,
        PlanMismatchError,
        StaleParameterError,
        UnshardedParameterError,
        UnsynchronizedGradientError,
    )
    from fcdp_compile.explanation import Explanation, explain
    from fcdp_compile.full_parameter import full
    from fcdp_compile.memory_report import Memory, memory
    from fcdp_compile.mesh import make_mesh
    from fcdp_compile.pretrained.export import save_pretrained
    from fcdp_compile.pretrained.load import load_pretrained
    from fcdp_compile.sharding import shard
    from fcdp_compile.strategy import Strategy
    from fcdp_compile.traffic_report import Traffic, traffic
    from fcdp_compile.whole import gathered

__all__ = [
    "CheckpointError",
    "Explanation",
    "FcdpError",
    "Loaded",
    "Memory",
    "PendingSave",
    "PlanFormatError",
    "PlanMismatchError",
    "StaleParameterError",
    "Strategy",
    "Traffic",
    "UnshardedParameterError",
    "UnsynchronizedGradientError",
    "explain",
    "full",
    "gathered",
    "load",
    "load_pretrained",
    "make_mesh",
    "materialize",
    "memory",
    "no_sync",
    "save",
    "save_pretrained",
    "shard",
    "traffic",
]

_HOMES = {
    "CheckpointError": "errors",
    "Explanation": "explanation",
    "FcdpError": "errors",
    "Loaded": "checkpointing.loading",
    "Memory": "memory_report",
    "PendingSave": "checkpointing.saving",
    "PlanFormatError": "errors",
    "PlanMismatchError": "errors",
    "StaleParameterError": "errors",
    "Strategy": "strategy",
    "Traffic": "traffic_report",
    "UnshardedParameterError": "errors",
    "UnsynchronizedGradientError": "errors",
    "explain": "explanation",
    "full": "full_parameter",
    "gathered": "whole",
    "load": "checkpointing.loading",
    "load_pretrained": "pretrained.load",
    "make_mesh": "mesh",
    "materialize": "deferred",
    "memory": "memory_report",
    "no_sync": "accumulation",
    "save": "checkpointing.saving",
    "save_pretrained": "pretrained.export",
    "shard": "sharding",
    "traffic": "traffic_report",
}


def __getattr__(name: str) -> Any:
    # Loaded on first use: the `fcdp` command reads plans without torch, which takes seconds to import.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
