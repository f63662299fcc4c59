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
    from fcdp_compile.core.params.inner_cut import declare_part as declare_part
    from fcdp_compile.core.params.mesh import make_mesh as make_mesh
    from fcdp_compile.core.sharding.full import full as full
    from fcdp_compile.core.sharding.gathered import gathered as gathered
    from fcdp_compile.core.sharding.no_sync import no_sync as no_sync
    from fcdp_compile.core.sharding.shard import shard as shard
    from fcdp_compile.errors import CheckpointError as CheckpointError
    from fcdp_compile.errors import FcdpError as FcdpError
    from fcdp_compile.errors import LostRankError as LostRankError
    from fcdp_compile.errors import PlanFormatError as PlanFormatError
    from fcdp_compile.errors import PlanMismatchError as PlanMismatchError
    from fcdp_compile.errors import StaleParameterError as StaleParameterError
    from fcdp_compile.errors import UnshardedParameterError as UnshardedParameterError
    from fcdp_compile.errors import UnsynchronizedGradientError as UnsynchronizedGradientError
    from fcdp_compile.models.checkpointing.loading import Loaded as Loaded
    from fcdp_compile.models.checkpointing.loading import load as load
    from fcdp_compile.models.checkpointing.saving import PendingSave as PendingSave
    from fcdp_compile.models.checkpointing.saving import save as save
    from fcdp_compile.models.deferred.materialize import materialize as materialize
    from fcdp_compile.models.parallel.context import context_parallel as context_parallel
    from fcdp_compile.models.parallel.pipeline import PipelineStage as PipelineStage
    from fcdp_compile.models.parallel.sequence import sequence_part as sequence_part
    from fcdp_compile.models.parallel.tensor import tensor_parallel as tensor_parallel
    from fcdp_compile.models.pretrained.exporting.changes import TensorChanges as TensorChanges
    from fcdp_compile.models.pretrained.exporting.export import save_pretrained as save_pretrained
    from fcdp_compile.models.pretrained.exporting.streaming import StateStream as StateStream
    from fcdp_compile.models.pretrained.exporting.streaming import stream_state as stream_state
    from fcdp_compile.models.pretrained.load import load_pretrained as load_pretrained
    from fcdp_compile.models.survival.keeper import Keeper as Keeper
    from fcdp_compile.models.survival.keeper import survive as survive
    from fcdp_compile.optimizers.combine import combine as combine
    from fcdp_compile.optimizers.muon import Muon as Muon
    from fcdp_compile.optimizers.offload import offload as offload
    from fcdp_compile.strategy import Strategy as Strategy
    from fcdp_compile.tools.report import Explanation as Explanation
    from fcdp_compile.tools.report import Memory as Memory
    from fcdp_compile.tools.report import Traffic as Traffic
    from fcdp_compile.tools.report import explain as explain
    from fcdp_compile.tools.report import exposed_wait as exposed_wait
    from fcdp_compile.tools.report import memory as memory
    from fcdp_compile.tools.report import traffic as traffic

__version__: str
"""The version of the installed package."""

_HOMES = {
    "CheckpointError": "errors",
    "Explanation": "tools.report",
    "FcdpError": "errors",
    "LostRankError": "errors",
    "Keeper": "models.survival.keeper",
    "Loaded": "models.checkpointing.loading",
    "Memory": "tools.report",
    "Muon": "optimizers.muon",
    "PendingSave": "models.checkpointing.saving",
    "PipelineStage": "models.parallel.pipeline",
    "PlanFormatError": "errors",
    "PlanMismatchError": "errors",
    "StaleParameterError": "errors",
    "StateStream": "models.pretrained.exporting.streaming",
    "Strategy": "strategy.strategy",
    "TensorChanges": "models.pretrained.exporting.changes",
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
    "survive": "models.survival.keeper",
    "tensor_parallel": "models.parallel.tensor",
    "traffic": "tools.report",
}
"""The module of each public name."""

__all__ = list(_HOMES)


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
