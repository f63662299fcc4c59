"""Step parameters while the backward still runs, as soon as their gradients have been reduced.

    backward   │ layer 3 │ layer 2     │ layer 1     │          optimizer.step()
    step                 │ bucket of 3 │ bucket of 2 │ bucket of 1

Gradients come out of a compiled graph together, so a graph's parameters are stepped beside the next graph.
After such a step a gradient may not change any more, and no further one may come before `optimizer.step()`.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fcdp_compile.errors import FcdpError
from fcdp_compile.optimizers.state_buckets import StateBucket, held_by
from fcdp_compile.params.home_shard import HomeShard, key_of
from fcdp_compile.params.home_tensor import HomeTensor
from fcdp_compile.runtime.model import ShardedModel
from fcdp_compile.runtime.optimizers.hooks import GradientHook


class BackwardSteps:
    """The steps of one optimizer's buckets in backwards outside of `no_sync`.

    settings: what the optimizer steps with now, such as learning rates.  feed: steps a bucket; called on the
    thread that runs the backward.
    """

    def __init__(
        self,
        model: ShardedModel,
        settings: Callable[[], Any],
        feed: Callable[[StateBucket], None],
    ) -> None:
        self._model = weakref.ref(model)
        self._settings = settings
        self._feed = feed
        self._used_settings: Any = None
        self._arrived: dict[int, set[int]] = {}
        # They have all their gradients, which may not be reduced yet.
        self._whole: deque[StateBucket] = deque()
        # By the bucket's number: what it was stepped with.
        self._used: dict[int, list[_Used]] = {}

    def watch(self, buckets: Iterable[StateBucket]) -> None:
        """Step these buckets from now on."""
        for bucket in buckets:
            for p in bucket.parameters:
                handle = p.register_post_accumulate_grad_hook(_Arrival(self, bucket))
                weakref.finalize(self, handle.remove)

    def arrive(self, bucket: StateBucket, parameter: Tensor) -> None:
        """Note that autograd has added to a parameter's `.grad`; step what can be stepped.

        Raises: FcdpError if the parameter was stepped since the last `optimizer.step()`.
        """
        model = self._model()
        if model is None or model.accumulation.is_on or model.optimizer_hooks.accumulates:
            return
        if bucket.number in self._used:
            self._forget(model)
            raise FcdpError(
                f"a second backward reached parameter {_name(model, parameter)!r}, which the one before had "
                "stepped; call optimizer.step() after each backward, run all but the last micro-batch within "
                "fcdp_compile.no_sync, or offload without in_backward=True (as GradScaler needs)"
            )
        arrived = self._arrived.setdefault(bucket.number, set())
        arrived.add(id(parameter))
        if all(id(p) in arrived for p in bucket.parameters if p.requires_grad):
            del self._arrived[bucket.number]
            self._whole.append(bucket)
        while self._whole and all(map(_is_ready, self._whole[0].parameters)):
            self._step(model, self._whole.popleft())

    def end(self) -> frozenset[int]:
        """The numbers of the buckets that were stepped since the last call.

        Raises: FcdpError if a gradient, or a setting of the optimizer, was changed after a step with it.
        """
        used = self._used
        model = self._model()
        if model is not None:
            self._forget(model)
        for one in (one for of in used.values() for one in of):
            if model is not None and one.is_changed():
                raise FcdpError(
                    f"the gradient of parameter {_name(model, one.parameter)!r} was changed after the "
                    "backward had stepped with it; to clip or unscale gradients, leave in_backward out"
                )
        if used and self._settings() != self._used_settings:
            raise FcdpError(
                "a setting of the optimizer's groups, such as lr, was changed after the backward had stepped "
                "with it; change settings before the backward, or offload without in_backward=True"
            )
        return frozenset(used)

    def refuse(self, what: str) -> None:
        """Refuse something that may not be done between a backward and `optimizer.step()`.

        Raises: FcdpError.
        """
        if self._used or self._whole:
            raise FcdpError(
                f"{what} between a backward and optimizer.step(), when some parameters are stepped already, "
                "would mix two states; do it after the step, or offload without in_backward=True"
            )

    def _forget(self, model: ShardedModel) -> None:
        self._used = {}
        self._arrived.clear()
        self._whole.clear()
        model.stepped.clear()

    def _step(self, model: ShardedModel, bucket: StateBucket) -> None:
        pairs = [(p, p.grad) for p in bucket.parameters]
        if not self._used:
            self._used_settings = self._settings()
        self._used[bucket.number] = [_Used(p, g) for p, g in pairs if g is not None]
        for p in bucket.parameters:
            if isinstance(p, HomeShard):
                p.seal = None  # its values change
        keys = [k for p in bucket.parameters if (k := key_of(p))]
        model.validity.values_changed(keys)
        model.stepped.update(keys)
        with torch.no_grad():
            self._feed(bucket)


class _Used:
    """A gradient that a parameter was stepped with."""

    def __init__(self, parameter: Tensor, grad: Tensor) -> None:
        self.parameter = parameter
        self._grad = grad
        self._held = held_by(grad)
        self._changes = grad._version, self._held._version

    def is_changed(self) -> bool:
        """Whether the parameter has another gradient now, or other values in it."""
        changes = self._grad._version, self._held._version
        return self.parameter.grad is not self._grad or changes != self._changes


class _Arrival(GradientHook):
    def __init__(self, steps: BackwardSteps, bucket: StateBucket) -> None:
        self._steps = weakref.ref(steps)
        self._bucket = bucket

    def __call__(self, parameter: Tensor) -> None:
        if (live := self._steps()) is not None:
            live.arrive(self._bucket, parameter)


def _is_ready(parameter: Tensor) -> bool:
    """Whether a parameter needs no gradient, or has one that is reduced and cut like the parameter."""
    grad = parameter.grad
    if not parameter.requires_grad or not isinstance(parameter, DTensor):
        return True
    is_alike = isinstance(grad, DTensor) and grad.placements == parameter.placements
    return is_alike and not (isinstance(grad, HomeTensor) and grad.is_late)


def _name(model: ShardedModel, parameter: Tensor) -> str:
    key = key_of(parameter)
    return "" if key is None else model.spec(key).name
