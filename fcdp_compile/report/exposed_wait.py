"""How long compute waited for transfers in a step, in figures for logs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from fcdp_compile.sharding.shard import state_of


class ExposedWait:
    """What `exposed_wait` has measured.

    seconds: how long this rank's compute waited for transfers.  0.0 until the block has ended.
    """

    seconds: float = 0.0


@contextmanager
def exposed_wait(model: nn.Module) -> Iterator[ExposedWait]:
    """Measure how long compute waits for transfers of a model's compiled graphs within a block.

        with fcdp_compile.exposed_wait(model) as wait:
            loss(compiled, batch).backward()
        print(wait.seconds)

    It adds two marks to each wait: on a GPU, events on the stream of compute.  There the end of the block
    waits for the device, so measure some steps, not all.  Reads outside of compiled graphs are not in it.

    model: sharded, compiled or not.

    Raises: ValueError if the model is not sharded.
    """
    state, found = state_of(model), ExposedWait()
    waits = state.exposure.begin()
    try:
        yield found
    finally:
        state.device.synchronize()
        found.seconds = state.exposure.end(waits)
