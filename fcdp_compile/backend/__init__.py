"""The `torch.compile` backend: from a Dynamo graph to programs that run."""

from fcdp_compile.backend.compilation import (
    fcdp,
    log,
)

__all__ = [
    "fcdp",
    "log",
]
