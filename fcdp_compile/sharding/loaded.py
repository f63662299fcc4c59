"""The refusals of `shard` for models that Transformers or Accelerate has spread over devices or ranks.

Both leave marks on the model: a mesh for tensor parallelism and FSDP2, a device map, hooks that bring values
from the host or from disk.  A model whose values are elsewhere has parameters on meta, which `shard` would
take for parameters that get their values later.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fcdp_compile.errors import ArgumentError

_FSDP = "ACCELERATE_USE_FSDP"


def check_loaded(model: nn.Module) -> None:
    """Refuse a model that is spread over devices or ranks, or that FSDP's launch settings have loaded.

    A device map with one device is fine; quantised loading sets one.

    Raises: ArgumentError.
    """
    if os.environ.get(_FSDP, "").lower() in ("1", "true", "yes", "on", "y", "t"):
        raise ArgumentError(
            f"{_FSDP} is set, as accelerate launch does for a configuration with FSDP, so from_pretrained "
            "leaves values out on some ranks for FSDP to fill in, and two systems cannot shard one model; "
            "choose no FSDP in accelerate config, or start the script with torchrun"
        )
    for name, module in model.named_modules():
        if (problem := _problem(module)) is not None:
            raise ArgumentError(f"{name or 'the model'} {problem}")


def _problem(module: nn.Module) -> str | None:
    own = vars(module)
    if isinstance(mesh := own.get("_device_mesh"), DeviceMesh) and mesh.size() > 1:
        sizes = zip(mesh.mesh_dim_names or (), mesh.shape, strict=False)
        spread = ", ".join(f"{name}={size}" for name, size in sizes if size > 1)
        return (
            f"was loaded with tp_plan or distributed_config, which spread it over ranks ({spread}); load it "
            "without these arguments, because shard spreads it"
        )
    device_map = own.get("hf_device_map")
    if isinstance(device_map, Mapping):
        devices = list(dict.fromkeys(map(_device_name, device_map.values())))
        if len(devices) > 1 or "disk" in devices:
            return (
                f"was loaded with a device_map over {', '.join(devices)}, but each rank of data parallel "
                "training has one device; leave device_map out or give it one device, or load the model "
                "with fcdp_compile.load_pretrained if it is too large for one device"
            )
    if _offloads(own.get("_hf_hook")):
        return (
            "is offloaded by Accelerate, whose hooks bring values to the device only while it computes; call "
            "accelerate.hooks.remove_hook_from_submodules(model), or do not offload the model, because fcdp "
            "moves parameters itself"
        )
    return None


def _device_name(device: Any) -> str:
    """One name for a device that a map may give as a number, a text or a torch.device."""
    name = f"cuda:{device}" if isinstance(device, int) else str(device)
    return "cuda:0" if name == "cuda" else name


def _offloads(hook: Any) -> bool:
    """Whether a hook of Accelerate, or one of several in a SequentialHook, offloads."""
    return any(getattr(h, "offload", False) for h in (hook, *getattr(hook, "hooks", ())))
