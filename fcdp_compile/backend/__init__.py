"""The `torch.compile` backend: turns a Dynamo graph into programs."""

from fcdp_compile.backend.compilation import (
    fcdp,
    log,
)

__all__ = [
    "fcdp",
    "log",
]
