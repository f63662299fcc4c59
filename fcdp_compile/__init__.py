"""fcdp: sharded data parallel training for clusters with a slow network between nodes.

    mesh  = fcdp_compile.make_mesh()
    model = fcdp_compile.shard(model, mesh, strategy="fcdp")
    model = torch.compile(model, backend="fcdp")

An independent implementation of "FCDP: Fully Cached Data Parallel for Communication-Avoiding Large-Scale
Training" (Park et al.) as a torch.compile backend.
"""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fcdp_compile.core.params.inner_cut import declare_part
    from fcdp_compile.core.params.mesh import make_mesh
    from fcdp_compile.core.sharding.full import full
    from fcdp_compile.core.sharding.gathered import gathered
    from fcdp_compile.core.sharding.no_sync import no_sync
    from fcdp_compile.core.sharding.shard import shard
    from fcdp_compile.errors import (
        CheckpointError,
        FcdpError,
        LostRankError,
        PlanFormatError,
        PlanMismatchError,
        StaleParameterError,
        UnshardedParameterError,
        UnsynchronizedGradientError,
    )
    from fcdp_compile.models.checkpointing.loading import Loaded, load
    from fcdp_compile.models.checkpointing.saving import PendingSave, save
    from fcdp_compile.models.deferred.materialize import materialize
    from fcdp_compile.models.parallel.context import context_parallel
    from fcdp_compile.models.parallel.pipeline import PipelineStage
    from fcdp_compile.models.parallel.sequence import sequence_part
    from fcdp_compile.models.parallel.tensor import tensor_parallel
    from fcdp_compile.models.pretrained.exporting.export import save_pretrained
    from fcdp_compile.models.pretrained.exporting.streaming import stream_state
    from fcdp_compile.models.pretrained.load import load_pretrained
    from fcdp_compile.optimizers.combine import combine
    from fcdp_compile.optimizers.muon import Muon
    from fcdp_compile.optimizers.offload import offload
    from fcdp_compile.strategy import Strategy
    from fcdp_compile.tools.report import (
        Explanation,
        Memory,
        Traffic,
        explain,
        exposed_wait,
        memory,
        traffic,
    )

__version__: str
"""The version of the installed package."""

__all__ = [
    "CheckpointError",
    "Explanation",
    "FcdpError",
    "Loaded",
    "LostRankError",
    "Memory",
    "Muon",
    "PendingSave",
    "PipelineStage",
    "PlanFormatError",
    "PlanMismatchError",
    "StaleParameterError",
    "Strategy",
    "Traffic",
    "UnshardedParameterError",
    "UnsynchronizedGradientError",
    "combine",
    "context_parallel",
    "declare_part",
    "explain",
    "exposed_wait",
    "full",
    "gathered",
    "load",
    "load_pretrained",
    "make_mesh",
    "materialize",
    "memory",
    "no_sync",
    "offload",
    "save",
    "save_pretrained",
    "sequence_part",
    "shard",
    "stream_state",
    "tensor_parallel",
    "traffic",
]

_HOMES = {
    "CheckpointError": "errors",
    "Explanation": "tools.report",
    "FcdpError": "errors",
    "LostRankError": "errors",
    "Loaded": "models.checkpointing.loading",
    "Memory": "tools.report",
    "Muon": "optimizers.muon",
    "PendingSave": "models.checkpointing.saving",
    "PipelineStage": "models.parallel.pipeline",
    "PlanFormatError": "errors",
    "PlanMismatchError": "errors",
    "StaleParameterError": "errors",
    "Strategy": "strategy.strategy",
    "Traffic": "tools.report",
    "UnshardedParameterError": "errors",
    "UnsynchronizedGradientError": "errors",
    "combine": "optimizers.combine",
    "context_parallel": "models.parallel.context",
    "declare_part": "core.params.inner_cut",
    "explain": "tools.report",
    "exposed_wait": "tools.report",
    "full": "core.sharding.full",
    "gathered": "core.sharding.gathered",
    "load": "models.checkpointing.loading",
    "load_pretrained": "models.pretrained.load",
    "make_mesh": "core.params.mesh",
    "materialize": "models.deferred.materialize",
    "memory": "tools.report",
    "no_sync": "core.sharding.no_sync",
    "offload": "optimizers.offload",
    "save": "models.checkpointing.saving",
    "save_pretrained": "models.pretrained.exporting.export",
    "sequence_part": "models.parallel.sequence",
    "shard": "core.sharding.shard",
    "stream_state": "models.pretrained.exporting.streaming",
    "tensor_parallel": "models.parallel.tensor",
    "traffic": "tools.report",
}


def __getattr__(name: str) -> Any:
    # Loaded on first use: the `fcdp` command reads plans without torch, which takes seconds to import.
    if name == "__version__":
        return _version()
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def _version() -> str:
    try:
        return importlib.metadata.version("fcdp")
    except importlib.metadata.PackageNotFoundError:  # a checkout that pip has not installed
        return "unknown"


def __dir__() -> list[str]:
    return sorted(__all__)
