"""fcdp: sharded data parallel training for clusters with a slow network between nodes.

    mesh  = fcdp_compile.make_mesh()
    model = fcdp_compile.shard(model, mesh, strategy="fcdp")
    model = torch.compile(model, backend="fcdp")

An independent implementation of "FCDP: Fully Cached Data Parallel for Communication-Avoiding Large-Scale
Training" (Park et al.) as a torch.compile backend.
"""

from fcdp_compile.errors import (
    FcdpError,
    PlanFormatError,
    PlanMismatchError,
    StaleParameterError,
    UnshardedParameterError,
)
from fcdp_compile.mesh import make_mesh
from fcdp_compile.sharding import shard
from fcdp_compile.strategy import Strategy
from fcdp_compile.traffic import Traffic, traffic

__all__ = [
    "FcdpError",
    "PlanFormatError",
    "PlanMismatchError",
    "StaleParameterError",
    "Strategy",
    "Traffic",
    "UnshardedParameterError",
    "make_mesh",
    "shard",
    "traffic",
]
