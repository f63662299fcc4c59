"""The `torch.compile` backend: turns a Dynamo graph into programs."""

from fcdp_compile.backend.compilation import fcdp

__all__ = ["fcdp"]
