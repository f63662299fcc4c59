"""GPUs that torch drives by `torch.cuda`."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_nccl_timeout

from fcdp_compile.devices.interface import Event, Stream, StreamDevice

log = logging.getLogger(__name__)

_POOLS = "reserved_bytes", "allocated_bytes"
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every CUDA context, as torch does it


class Cuda(StreamDevice):
    """A GPU that torch drives by `torch.cuda`."""

    kind = "cuda"
    backends = "cpu:gloo,cuda:nccl"
    # Both backends get one timeout; torch's default for the two would let NCCL wait as long as Gloo.
    timeout = default_pg_nccl_timeout

    @classmethod
    def is_available(cls) -> bool:
        return torch.cuda.is_available()

    @classmethod
    def current(cls) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    @classmethod
    def choose(cls, local_rank: int) -> None:
        """Make a GPU this process's current device; if there are more ranks than GPUs, ranks share GPUs."""
        torch.cuda.set_device(local_rank % torch.cuda.device_count())

    @classmethod
    def is_capturing(cls) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def new_stream(self, *, is_urgent: bool) -> Stream:
        stream: Stream = torch.cuda.Stream(self.torch, priority=-1 if is_urgent else 0)
        return stream

    def current_stream(self) -> Stream:
        stream: Stream = torch.cuda.current_stream(self.torch)
        return stream

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        within: AbstractContextManager[Any] = torch.cuda.stream(stream)  # type: ignore[arg-type]
        return within

    def record(self, *, is_timed: bool = False) -> Event:
        event = torch.cuda.Event(enable_timing=is_timed)
        event.record(torch.cuda.current_stream(self.torch))
        return event

    def enter_thread(self) -> None:
        torch.cuda.set_device(self.torch)

    def synchronize(self) -> None:
        torch.cuda.current_stream(self.torch).synchronize()

    def total_bytes(self) -> int:
        return int(torch.cuda.get_device_properties(self.torch).total_memory)

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.torch)[0])

    def used_bytes(self) -> int:
        free, total = torch.cuda.mem_get_info(self.torch)
        # `torch.cuda.memory_reserved` flattens and sorts some 200 figures to look one up (112 us).
        found = torch.cuda.memory_stats_as_nested_dict(self.torch)
        kept, allocated = (found[of]["all"]["current"] if found else 0 for of in _POOLS)
        return int(total - free - (kept - allocated))

    def peak_bytes(self) -> int:
        return int(torch.cuda.max_memory_allocated(self.torch))

    @property
    def shares_memory(self) -> bool:
        return bool(torch.cuda.get_device_properties(self.torch).is_integrated)

    @property
    def registers(self) -> bool:
        return True

    def pinned_like(self, tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)

    def register(self, address: int, size_bytes: int) -> str:
        cudart = torch.cuda.cudart()
        with torch.cuda.device(self.torch):
            code = cudart.cudaHostRegister(address, size_bytes, _PORTABLE)
            if int(code) == 0:
                return ""
            self._forget_error()
            return str(cudart.cudaGetErrorString(code))

    def unregister(self, address: int) -> None:
        with torch.cuda.device(self.torch):
            torch.cuda.synchronize(self.torch)
            torch.cuda.cudart().cudaHostUnregister(address)

    def runs_on_stream(self, group: dist.ProcessGroup | None) -> bool:
        """Whether the group has NCCL for GPUs, however its backend was requested.

        torch calls the backend of a group made without one "undefined"; its config names the real one.
        """
        pairs = (entry.split(":") for entry in dist.get_backend_config(group).split(","))
        return "nccl" in dict(pairs).get("cuda", "")

    def rng_state(self) -> Tensor:
        return torch.cuda.get_rng_state(self.torch)

    def set_rng_state(self, state: Tensor) -> None:
        torch.cuda.set_rng_state(state, self.torch)

    def name(self) -> str:
        return torch.cuda.get_device_name(self.torch)

    def identity(self) -> str:
        return str(torch.cuda.get_device_properties(self.torch).uuid)

    def _forget_error(self) -> None:
        """Clear CUDA's last error, which the next kernel launch would report as its own."""
        # torch (2.11 to 2.15) has no cudaGetLastError, but a launch reads and clears it.
        try:
            torch.ones(1, device=self.torch).add_(1)
        except RuntimeError as error:
            log.debug("cleared the error of cudaHostRegister: %s", error)
