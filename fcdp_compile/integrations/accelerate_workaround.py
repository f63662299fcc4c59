"""Keeps Accelerate from wrapping or compiling the model itself.

Tried with accelerate 1.15 and transformers 5.23.  Only public names are used, four of them unusually:

* `Accelerator.prepare_model(evaluation_mode=True)` wraps the forward into autocast, and leaves out
  DistributedDataParallel, which refuses DTensor parameters.
* `Accelerator.no_sync(model)` enters `model.no_sync` if there is one (DDP's is meant), so the model gets one.
* `Accelerator.unwrap_model` leaves `torch.compile`'s wrapper on.  The Trainer checks the class of the result
  to see whether label smoothing has to shift the labels, and the wrapper's class would mislead it, so here
  `unwrap_model` removes the wrapper.
* `DynamoBackend`, an enum, has no "fcdp": Accelerate gets no backend, and the model is compiled here.

Accelerate has no registration of backends or of ways to shard that would make this unnecessary.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import TrainingArguments

from fcdp_compile.sharding.no_sync import no_sync

BACKEND = "fcdp"


def prepare(
    accelerator: Accelerator,
    model: nn.Module,
    *,
    mode: str | None = None,
    dynamic: bool | None = None,
    options: Mapping[str, Any],
) -> nn.Module:
    """Give a sharded model the autocast and the `no_sync` that Accelerate expects, and compile it.

    mode, dynamic, options: arguments of torch.compile.
    """
    prepare_again(accelerator, model)
    vars(accelerator)["unwrap_model"] = functools.partial(
        accelerator.unwrap_model, keep_torch_compile=False
    )
    vars(model)["no_sync"] = functools.partial(_no_sync, weakref.ref(model))
    compiled: Any = torch.compile(
        model, backend=BACKEND, mode=mode, dynamic=dynamic, options=dict(options) or None
    )
    found: nn.Module = compiled  # typed by torch as a function
    return found


def prepare_again(accelerator: Accelerator, model: nn.Module) -> None:
    """Prepare the model again, because the Accelerator forgets it at the start of every training."""
    prepared = accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
    assert prepared is model, f"Accelerate wrapped the model into a {type(prepared).__name__}"


@contextmanager
def unknown_backend(args: TrainingArguments) -> Iterator[None]:
    """Hide `torch_compile_backend="fcdp"` from Accelerate, which raises for a backend that its enum lacks."""
    given = args.torch_compile_backend
    if given != BACKEND:
        yield
        return
    args.torch_compile_backend = None
    try:
        yield
    finally:
        args.torch_compile_backend = given


def _no_sync(model: weakref.ref[nn.Module]) -> AbstractContextManager[None]:
    living = model()
    assert living is not None, "the function is an attribute of the model"
    return no_sync(living)
