"""Home shards and gradients that live in host memory: copies to the device and back, on the lanes.

    home shards on the host -> load [S] on the device      before a gather of their bucket
    reduced gradients [S]   -> store [S] on the host       after the last step of a reduction

The optimizer steps on the host, as with FSDP2's CPUOffloadPolicy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fcdp_compile.core.params.packing import home_slots
from fcdp_compile.core.params.registry import ParamSpec
from fcdp_compile.devices import Device, Stream, StreamDevice
from fcdp_compile.plan import Bucket, Kind
from fcdp_compile.runtime.collectives.counters import Counters
from fcdp_compile.runtime.lanes.lanes import Lanes, range_name, tensor_of
from fcdp_compile.runtime.lanes.tasks import Done, Pending
from fcdp_compile.torch_compat.tensors import copy_all


class HomeTransfers:
    """Moves the home shards and gradients of one model that live on the host.  node: of this rank."""

    def __init__(self, counters: Counters, lanes: Lanes, node: int) -> None:
        self._counters = counters
        self._lanes = lanes
        self._node = node
        self._last: Done | None = None  # the load that the host may not be done with
        self._host = _Host(lanes.device)

    def shard_to_device(self, spec: ParamSpec, shard: Tensor) -> Tensor:
        """A home shard on the device, for code without a plan."""
        if spec.computes_on is not None:
            self._counters.add(Kind.LOAD_HOME, spec.slot_bytes)
        return shard.to(self._lanes.device.torch)

    def grad_to_home(self, spec: ParamSpec, grad: Tensor) -> Tensor:
        """A reduced gradient shard where its home shard is, for code without a plan; complete on return."""
        if spec.computes_on is None:
            return grad
        self._counters.add(Kind.STORE_GRADS, spec.slot_bytes)
        return grad.to("cpu")

    def load(self, bucket: Bucket, shards: Sequence[Tensor]) -> Pending:
        """Copy a bucket's home shards to the device, packed and cast as `pack_home` does."""
        device = self._lanes.device.torch
        layouts, dtype = [p.layout for p in bucket.params], getattr(torch, bucket.dtype)
        elements = sum(layout.elements_of(self._node) for layout in layouts)
        with torch.inference_mode(False):  # the lane's thread writes to it
            out = torch.empty(elements, dtype=dtype, device=device)
        scratch = self._lanes.scratch()

        def run() -> None:
            # A copy between host and device that also casts or reorders would make the Python thread wait.
            flat = scratch.empty(out, sum(s.numel() for s in shards), shards[0].dtype)
            pieces = flat.split([s.numel() for s in shards])
            here = [piece.view(s.shape) for piece, s in zip(pieces, shards, strict=True)]
            copy_all(here, shards)
            used, parts, padding = home_slots(out, here, layouts, self._node)
            copy_all(used, parts)
            for rest in padding:
                rest.zero_()

        self._counters.add(Kind.LOAD_HOME, elements * shards[0].itemsize)
        name = range_name(Kind.LOAD_HOME, bucket)
        loaded = self._lanes.start(
            Kind.LOAD_HOME.lane, run, out=out, reads=list(shards), name=name, scratch=scratch
        )
        self._last = loaded.done
        return loaded

    def store(self, bucket: Bucket, grads: Tensor | Pending, dtype: torch.dtype) -> Pending:
        """Copy reduced gradients to new host memory, in the dtype of the home shards."""
        own = tensor_of(grads)
        host = self._lanes.device.pinned_like(torch.empty(own.shape, dtype=dtype, device="meta"))

        def run() -> None:
            host.copy_(own.to(dtype), non_blocking=True)

        self._counters.add(Kind.STORE_GRADS, host.nbytes)
        name = range_name(Kind.STORE_GRADS, bucket)
        stored = self._lanes.start(Kind.STORE_GRADS.lane, run, out=host, reads=[grads], name=name)
        assert stored.done is not None, "a lane runs it"
        return Pending(host, done=_OnHost(stored.done, self._host))

    def settle(self) -> None:
        """Wait until all loads have read the host: the Python thread may write to home shards next."""
        if self._last is not None:
            last, self._last = self._last, None
            self._host.wait_for(last)


class _Host:
    """Makes the Python thread wait for a task, and for no other work of the device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream: Stream | None = None

    def wait_for(self, done: Done) -> None:
        if not isinstance(self._device, StreamDevice):
            done.order()
            return
        if self._stream is None:
            self._stream = self._device.new_stream(is_urgent=False)
        with self._device.on(self._stream):
            done.order()
            reached = self._device.record()
        reached.synchronize()


class _OnHost:
    """The end of a task whose result the Python thread reads: it waits, not its stream alone."""

    def __init__(self, done: Done, host: _Host) -> None:
        self._done = done
        self._host = host

    def order(self) -> None:
        self._done.order()
        self._host.wait_for(self._done)

    def passed(self) -> None:
        self._done.passed()
