"""The device that the distributed tests run on, FCDP_TEST_DEVICE: the CPU, or `sim`, or `cuda`.

sim: the simulated device of this folder; each rank has one.  With FCDP_TEST_GLOO=1, Gloo connects them.
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
    """Before ranks fork from a process: compile the device; keep this process away from a card."""
    if is_simulated():
        from tests.device.build import extension

        extension()
    elif device_kind() == "cuda":
        # Imported modules ask torch for CUDA.  If NVML does not answer, CUDA does, and then fails in forked
        # processes.
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

    wait_s: how long ranks wait for each other, if their groups are Gloo's and so are not fcdp's to make.
    """
    kind = device_kind()
    with _as_default(kind):
        is_gloo = kind == "cuda" or os.environ.get("FCDP_TEST_GLOO") == "1"
        if is_gloo and int(os.environ["WORLD_SIZE"]) > 1:
            timeout = default_pg_timeout if wait_s is None else timedelta(seconds=wait_s)
            dist.init_process_group(f"cpu:gloo,{kind}:gloo", timeout=timeout)
        yield


@contextlib.contextmanager
def _as_default(kind: str) -> Iterator[None]:
    if kind == "cpu":
        yield
    elif kind == "sim":
        from tests.device import sim

        with sim.as_default():
            yield
    else:
        torch.set_default_device(f"{kind}:0")
        try:
            yield
        finally:
            torch.set_default_device(None)


def seeded(seed: int) -> torch.Generator:
    """A generator of the default device, which is the only one that the device's factories take."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)
