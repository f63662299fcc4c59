"""The simulated device as torch and fcdp know it: `torch.device("sim")`, groups "simccl", the class `Sim`.

`sim.cpp` says how it behaves.  `use()` registers all of it in this process, where CPUs were before.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fcdp_compile.devices import Event, Stream, StreamDevice, register
from tests.device.build import extension

KIND = "sim"
_GROUPS = "simccl"
_OF_TWO = ("send", "recv")
"""Operations that only two ranks of a group take part in."""


class Sim(StreamDevice):
    """The simulated device of this process."""

    kind = KIND
    backends = f"cpu:gloo,{KIND}:{_GROUPS}"

    @classmethod
    def is_available(cls) -> bool:
        return True

    @classmethod
    def current(cls) -> torch.device:
        return torch.device(KIND, 0)

    def new_stream(self, *, is_urgent: bool) -> Stream:
        stream: Stream = torch.Stream(device=self.torch)
        return stream

    def current_stream(self) -> Stream:
        stream: Stream = torch.accelerator.current_stream()
        return stream

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        within: Any = stream
        return within  # type: ignore[no-any-return]

    def record(self, *, is_timed: bool = False) -> Event:
        event = torch.Event(device=self.torch, enable_timing=is_timed)
        event.record(torch.accelerator.current_stream())
        return event

    def synchronize(self) -> None:
        torch.accelerator.current_stream().synchronize()

    def total_bytes(self) -> int:
        return int(extension().memory()["total"])

    def free_bytes(self) -> int:
        found = extension().memory()
        return int(found["total"] - found["used"])

    def used_bytes(self) -> int:
        return int(extension().memory()["used"])

    def peak_bytes(self) -> int:
        return int(extension().memory()["peak"])

    @property
    def registers(self) -> bool:
        return True

    def pinned_like(self, tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)

    def register(self, address: int, size_bytes: int) -> str:
        extension().register_host(address, size_bytes)
        return ""

    def unregister(self, address: int) -> None:
        extension().synchronize()
        extension().unregister_host(address)

    def runs_on_stream(self, group: dist.ProcessGroup | None) -> bool:
        pairs = (entry.split(":") for entry in dist.get_backend_config(group).split(","))
        return "ccl" in dict(pairs).get(KIND, "")

    def rng_state(self) -> Tensor:
        state: Tensor = extension().rng_state()
        return state

    def set_rng_state(self, state: Tensor) -> None:
        extension().set_rng_state(state.cpu())

    def name(self) -> str:
        return "simulated device"

    def identity(self) -> str:
        return f"{socket.gethostname()}-{os.getpid()}"


def _module() -> ModuleType:
    """`torch.sim`, which torch asks for what `torch.cuda` would answer."""
    module: Any = ModuleType(f"torch.{KIND}")
    module.is_available = module.is_initialized = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = lambda device: None
    module.device = lambda device: contextlib.nullcontext()
    module._is_in_bad_fork = lambda: False
    module.manual_seed = module.manual_seed_all = lambda seed: extension().seed(seed % 2**64)
    module.get_rng_state = lambda device=KIND: extension().rng_state()
    module.set_rng_state = lambda state, device=KIND: extension().set_rng_state(state)
    module.synchronize = lambda device=None: extension().synchronize()
    module.current_stream = lambda device=None: torch.accelerator.current_stream()
    module.Stream = functools.partial(torch.Stream, device=KIND)
    module.Event = functools.partial(torch.Event, device=KIND)
    module.stream = lambda stream: contextlib.nullcontext() if stream is None else stream
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.memory_allocated = lambda device=None: extension().memory()["used"]
    module.max_memory_allocated = lambda device=None: extension().memory()["peak"]
    module.reset_peak_memory_stats = lambda device=None: extension().reset_peak()
    module.empty_cache = lambda: None
    module.mem_get_info = lambda device=None: (
        extension().memory()["total"] - extension().memory()["used"],
        extension().memory()["total"],
    )
    return module


def _group(made: Any, options: Any) -> Any:
    """A group of the device: `collectives.cpp` around one of Gloo."""
    gloo = dist.ProcessGroupGloo(made.store, made.group_rank, made.group_size, made.timeout)
    return extension().make_group(gloo, made.group_id)


def issued_in_other_orders(logs: Sequence[Sequence[str]]) -> str:
    """Compare what ranks have issued, in each pair's common groups; returns the first difference, or nothing.

    Ranks that issue to two groups in different orders may wait for each other for ever: collectives that wait
    for their peers hold processors of the device.  logs: by rank, "group operation elements".
    """
    for one, other in itertools.combinations(range(len(logs)), 2):
        entries = [[entry.split()[:2] for entry in logs[rank]] for rank in (one, other)]
        common = set.intersection(*({group for group, _ in of} for of in entries))
        both = [[e for e in of if e[0] in common and e[1] not in _OF_TWO] for of in entries]
        for i, (here, there) in enumerate(itertools.zip_longest(*both)):
            if here != there:
                return f"collective {i} of ranks {one} and {other}: {here} and {there}"
    return ""


@functools.cache
def use() -> None:
    """Let torch and fcdp use the device in this process, also where code names no device."""
    extension()
    torch.utils.rename_privateuse1_backend(KIND)
    torch._register_device_module(KIND, _module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    dist.Backend.register_backend(_GROUPS, _group, extended_api=True, devices=[KIND])
    register(Sim)


@contextlib.contextmanager
def as_default() -> Iterator[None]:
    """Within the block, factories of torch make tensors on the device."""
    use()
    torch.set_default_device(KIND)
    try:
        yield
    finally:
        torch.set_default_device(None)
        extension().synchronize()
