"""What the modules of a sharded model share: whether a forward is running, and what it has gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fcdp_compile.core.params.registry import lost_write
from fcdp_compile.torch_compat.autograd import is_in_transform
from fcdp_compile.torch_compat.compilers import skip_frame


class Read(NamedTuple):
    """What was gathered, without its memory, and its version at that time."""

    key: str
    counter: Tensor
    version: int

    @staticmethod
    def of(key: str, full: Tensor) -> Read:
        """A whole parameter that was just gathered."""
        counter = full.detach()  # shares the count of writes
        if not is_in_transform():  # torch.func allows no other memory there
            # Devices from outside torch let no tensor of inference mode stand in for another tensor.
            with torch.inference_mode(False):
                counter.data = full.new_empty(0)
        return Read(key, counter, full._version)


class Gate:
    """Whether a forward of any module of the model is running; shared by all its modules and shards.

    is_called: whether the model itself is being called, compiled or not, which begins before Dynamo checks
    its guards.
    has_layers: whether equal layers are compiled by themselves (`core.sharding.layers`); None until Dynamo
    reaches the first of them.  stack: the innermost module with equal layers whose forward Python runs.
    anchor: requires a gradient, and never gets one.  reads: what the forward that Python runs has gathered.
    """

    def __init__(self) -> None:
        self.inside = False
        self.is_called = False
        self.has_layers: bool | None = None
        self.stack: nn.Module | None = None
        self.anchor = torch.zeros((), device="cpu", requires_grad=True)
        self.reads: list[Read] | None = None

    def watch(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a forward, and refuse writes to the parameters that it gathers; graphs have their own check."""
        before = self.inside, self.reads
        reads: list[Read] = []
        self.inside, self.reads = True, reads
        try:
            result = forward(*args, **kwargs)
        finally:
            self.inside, self.reads = before
        for read in reads:
            if read.counter._version != read.version:
                raise lost_write(read.key, f"in {forward.__qualname__}")
        return result


# All classes share its code, and Dynamo counts recompilations by code object.
skip_frame(Gate.watch)
