"""The device that the distributed tests run on, FCDP_TEST_DEVICE: the CPU, or `sim`, or `cuda`.

sim: the simulated device of this folder; each rank has one.
cuda: a real card, the first one, which all ranks share; NCCL connects no ranks on one card, but Gloo does.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

def device_kind() -> str:
    """The type of the device that tests run on."""
    return os.environ.get("FCDP_TEST_DEVICE", "cpu")


def is_simulated() -> bool:
    """Whether tests run on the simulated device."""
    return device_kind() == "sim"


def prepare_test_device() -> None:
    """Before the ranks start: compile the device, or keep the process that ranks are forked from off the card."""
    if is_simulated():
        from tests.device.build import extension

        extension()
    elif device_kind() == "cuda":
        # Imported modules ask whether there is CUDA; asked without NVML, CUDA refuses to work in forked processes.
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"


def issued() -> list[str]:
    """The collectives that this process has issued on the simulated device."""
    if not is_simulated():
        return []
    from tests.device.build import extension

    return list(extension().issued())


def issued_in_other_orders(logs: Sequence[Sequence[str]]) -> str:
    """What two ranks issued in different orders on the simulated device, or nothing."""
    if not any(logs):
        return ""
    from tests.device import sim

    return sim.issued_in_other_orders(logs)


@contextlib.contextmanager
def on_test_device(wait_s: float | None = None) -> Iterator[None]:
    """Within the block, tensors are on the device of the tests unless code names another one.

    wait_s: how long ranks on a shared card wait for each other; other devices' groups are fcdp's to make.
    """
    kind = device_kind()
    if kind == "sim":
        from tests.device import sim

        with sim.as_default():
            yield
    elif kind == "cpu":
        yield
    else:
        if int(os.environ["WORLD_SIZE"]) > 1:
            timeout = default_pg_timeout if wait_s is None else timedelta(seconds=wait_s)
            dist.init_process_group(f"cpu:gloo,{kind}:gloo", timeout=timeout)
        torch.set_default_device(f"{kind}:0")
        try:
            yield
        finally:
            torch.set_default_device(None)
