"""Accelerate's own test scripts (in its wheel), with fcdp's Accelerator in place of Accelerate's.

The scripts take `Accelerator` from their module, so that is where ours goes: the module is the adapter's own
copy, loaded under another name.  A script's functions that take an accelerator get ours.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
from importlib.metadata import version as version_of
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tests.distributed.parity import whole
from tests.peers.outcomes import SkippedError

LAYOUT = 2, 1
"""test_distributed_data_loop asserts that it has 2 ranks."""

_SCRIPTS = ("test_sync", "test_distributed_data_loop")
_VARIANTS = {
    "test_sync.test_gradient_accumulation": 3,
    "test_sync.test_gradient_accumulation_with_opt_and_scheduler": 3,
}
"""The number of switches that the scripts' `main` tries in all combinations."""

_LEFT_OUT = {
    "test_sync.test_noop_sync": "the script's main calls it in one process only",
}


def version() -> str:
    return f"Accelerate {version_of('accelerate')}"


def cases() -> list[str]:
    names = [
        f"{script}.{name}"
        for script in _SCRIPTS
        for name, function in vars(_script(script)).items()
        if name.startswith("test_") and inspect.isfunction(function)
    ]
    return [
        f"{name} {number:0{_VARIANTS[name]}b}" if name in _VARIANTS else name
        for name in names
        for number in range(2 ** _VARIANTS.get(name, 0))
    ]


def run(mesh: DeviceMesh, case: str) -> None:
    """Call one function of a script as the script's `main` does."""
    from accelerate.state import AcceleratorState, GradientState

    name, _, switches = case.partition(" ")
    for left_out, why in _LEFT_OUT.items():
        if name.startswith(left_out):
            raise SkippedError(why)
    script = _script(name.split(".")[0])
    function = getattr(script, name.split(".")[1])
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    torch.manual_seed(0)
    if "data_loader" in inspect.signature(function).parameters:
        _on_loaders(script, function)
    elif "accelerator" in inspect.signature(function).parameters:
        function(_accelerator(script))
    else:
        function(*(switch == "1" for switch in switches))


class _Torch(ModuleType):
    """torch for the scripts, which compare gradients of parameters that DDP leaves whole on every rank.

    Within `no_sync` fcdp's gradients wait elsewhere and `.grad` is None, which is "not in sync".
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def allclose(a: Tensor | None, b: Tensor | None, **options: Any) -> bool:
        if a is None or b is None:
            return False
        return torch.allclose(whole(a), whole(b), **options)


def _accelerator(script: Any) -> Any:
    """As each script's `main` makes it."""
    make = getattr(script, "create_accelerator", None)
    return make() if make else script.Accelerator()


def _on_loaders(script: Any, function: Any) -> None:
    """The loaders that `main` of test_distributed_data_loop makes."""
    from torch.utils.data import BatchSampler, DataLoader, RandomSampler

    data, size = script.DummyDataset(), script.BATCH_SIZE
    for options in (
        {"shuffle": False, "batch_size": size},
        {"shuffle": True, "batch_size": size},
        {"batch_sampler": BatchSampler(RandomSampler(data), batch_size=size, drop_last=False)},
    ):
        function(DataLoader(data, **options), _accelerator(script))


@functools.cache
def _script(name: str) -> Any:
    """A copy of a script that is ours, with our Accelerator."""
    from fcdp_compile.integrations.accelerate import Accelerator

    found = importlib.util.find_spec(f"accelerate.test_utils.scripts.{name}")
    assert found is not None
    assert found.origin is not None
    spec = importlib.util.spec_from_file_location(f"peers_{name}", found.origin)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    module.torch = _Torch("torch")  # type: ignore[attr-defined]
    # The scripts expect a launcher that has chosen CPUs or GPUs.
    module.Accelerator = functools.partial(Accelerator, cpu=True)  # type: ignore[attr-defined]
    return module
