"""Let a backward program end before its reductions do: they run while the next program computes.

[Note: drains] A backward program ends with steps that only wait for its last reductions: its drain.  The
program returns without them, and its gradients are `LateTensor`s.  The drain runs when the drain of the next
program begins, when the backward ends, or when anything reads one of the gradients, whichever comes first.
So at most one program's reductions are on their way beside another program, and after a backward all
gradients have their values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

from torch import Tensor

from fcdp_compile.params.home_tensor import HomeTensor
from fcdp_compile.params.late import Awaited, LateTensor
from fcdp_compile.runtime.parameters.record import ParamRecord
from fcdp_compile.torch_compat import at_end_of_backward, backward_number


class Drains:
    """The drain of one model that has not run yet."""

    def __init__(self) -> None:
        self._last: _Drain | None = None
        self._backward = -1
        self._trained: dict[int, Sequence[ParamRecord]] = {}

    def begin(
        self,
        run: Callable[[], Sequence[Tensor]],
        likes: Sequence[Tensor],
        trained: Sequence[ParamRecord],
    ) -> list[Tensor]:
        """Run the last drain if it has not run; the results of `run`, which runs later.

        likes: tensors of the shapes, strides, dtypes and devices of the results, such as fake tensors.
        trained: the parameters whose gradients the results are; equal plans give the same sequence.
        """
        self._trained[id(trained)] = trained
        if self._backward == backward_number():
            self._run_last()
        else:  # a drain of another backward, which may have failed, runs when its gradients are read
            self._backward = backward_number()
            at_end_of_backward(self.finish)
        self._last = drain = _Drain(run, len(likes))
        return [
            LateTensor(like, awaited) for like, awaited in zip(likes, drain.results, strict=True)
        ]

    def finish(self) -> None:
        """Run the last drain if it has not run, and replace late tensors in gradients by their values."""
        self._backward = -1
        trained, self._trained = self._trained, {}
        self._run_last()
        for record in chain.from_iterable(trained.values()):
            for parameter in record.places():
                if isinstance(grad := parameter.grad, HomeTensor):
                    grad.present()

    def _run_last(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            last.finish()


class _Drain:
    """The end of one program.

    results: empty once it has run.
    """

    def __init__(self, run: Callable[[], Sequence[Tensor]], count: int) -> None:
        self._run: Callable[[], Sequence[Tensor]] | None = run
        self._error: BaseException | None = None
        self.results = [Awaited(self.finish) for _ in range(count)]

    def finish(self) -> None:
        if self._error is not None:
            raise self._error
        if self._run is None:
            return
        run, self._run = self._run, None
        try:
            values = run()
        except BaseException as error:
            self._error = error
            raise
        for result, value in zip(self.results, values, strict=True):
            result.value = value
            result.finish = _nothing
        self.results.clear()


def _nothing() -> None:
    return None
