"""A result that is on its way."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor


class Pending:
    """A started transfer or collective; `wait` hands its result over, once.

    On NCCL `wait` makes the current stream wait, on Gloo the Python thread.  The sent buffer is held until
    then because the collective reads it.
    """

    __slots__ = ("_finish", "_held", "_result", "_work")

    def __init__(
        self,
        result: Tensor,
        *,
        work: dist.Work | None = None,
        held: Tensor | None = None,
        finish: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._result: Tensor | None = result
        self._work = work
        self._held = held
        self._finish = finish

    def wait(self) -> Tensor:
        """The result, complete for whoever uses it next on this thread's stream."""
        if self._work is not None:
            self._work.wait()
        result, finish = self._result, self._finish
        assert result is not None, "a pending step was waited for twice"
        self._work = self._held = self._result = self._finish = None
        return result if finish is None else finish(result)
