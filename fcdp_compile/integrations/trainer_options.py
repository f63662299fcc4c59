"""The options of the Trainer of `integrations.transformers`, and the training arguments that it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, DynamoBackend
from transformers import TrainingArguments
from transformers.training_args import OptimizerNames, ParallelMode

from fcdp_compile.backend.options import Options
from fcdp_compile.devices import StreamDevice, current_device
from fcdp_compile.errors import ArgumentError
from fcdp_compile.params.mesh import process_count
from fcdp_compile.strategy import Strategy

BACKEND = "fcdp"

_STEPS_IN_BACKWARD = (
    OptimizerNames.LOMO,
    OptimizerNames.ADALOMO,
    OptimizerNames.GALORE_ADAMW_LAYERWISE,
    OptimizerNames.GALORE_ADAMW_8BIT_LAYERWISE,
    OptimizerNames.GALORE_ADAFACTOR_LAYERWISE,
    OptimizerNames.APOLLO_ADAMW_LAYERWISE,
)
"""Optimizers that step each parameter in a hook as soon as its gradient arrives, before it is reduced."""


@dataclass(frozen=True, kw_only=True)
class FcdpOptions:
    """How the Trainer shards and compiles its model.

    strategy, param_dtype, reduce_dtype, gradient_on, module_strategies: as `fcdp_compile.shard` takes them.
    nodes: as `fcdp_compile.make_mesh` does; by default torchrun's nodes.  dynamic: as `torch.compile` does.
    options: the backend's options, `torch.compile(…, backend="fcdp", options=…)`.

    Raises: ValueError or TypeError for a strategy or an option that does not exist.
    """

    strategy: str | Strategy = "fcdp"
    nodes: int | None = None
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    gradient_on: str | None = None
    module_strategies: Mapping[str, str | Strategy] | None = None
    dynamic: bool | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        Strategy.parse(self.strategy)
        Options.parse(self.options)

    def shard_arguments(self) -> dict[str, Any]:
        """The arguments of `fcdp_compile.shard` after the mesh."""
        return {
            name: getattr(self, name)
            for name in (
                "strategy",
                "param_dtype",
                "reduce_dtype",
                "gradient_on",
                "module_strategies",
            )
        }

    def check_sharded_before(self) -> None:
        """Refuse options that come too late for a model that its owner has sharded.

        Raises: ValueError.
        """
        defaults = {f.name: f.default for f in fields(self)}
        for name in ("nodes", *self.shard_arguments()):
            if (value := getattr(self, name)) != defaults[name]:
                raise ArgumentError(
                    f"FcdpOptions({name}={value!r}) comes too late: the model is sharded already; give it to "
                    "fcdp_compile.shard or make_mesh, or give the Trainer an unsharded model"
                )


def check_arguments(args: TrainingArguments) -> None:
    """Refuse training arguments that ask for another way to shard, to compile or to step.

    Raises: ValueError, which says what to change.
    """
    problem = _problem(args)
    if problem is not None:
        raise ArgumentError(f"the fcdp Trainer cannot do this: {problem}")


def _problem(args: TrainingArguments) -> str | None:
    for name in ("deepspeed", "fsdp", "parallelism_config"):
        if getattr(args, name, None):
            return f"{name} is given, and one model cannot be sharded by two systems; leave it out"
    if args.torch_compile and args.torch_compile_backend != BACKEND:
        return (
            f"torch_compile with backend {args.torch_compile_backend!r} is given, but the model is compiled "
            "with backend 'fcdp' anyway; leave torch_compile and torch_compile_backend out"
        )
    if args.auto_find_batch_size:
        return (
            "auto_find_batch_size would start again with a smaller batch only on the rank that ran out "
            "of memory; choose per_device_train_batch_size and set it to False"
        )
    if args.bf16_full_eval or args.fp16_full_eval:
        return (
            "bf16_full_eval and fp16_full_eval convert the whole model, which is sharded; use "
            "FcdpOptions(param_dtype=…) or bf16=True"
        )
    if args.save_on_each_node:
        return (
            "save_on_each_node is given, but each rank writes its part of one checkpoint; give an output_dir "
            "that all nodes share and leave it out"
        )
    optimizer = OptimizerNames(args.optim)
    if optimizer in _STEPS_IN_BACKWARD:
        return (
            f"optimizer {optimizer.value!r} steps inside of the backward, where gradients are not reduced "
            "yet; use adamw_torch or another that steps after it"
        )
    if args.parallel_mode is ParallelMode.TPU:
        return "torch_xla is installed, and fcdp has no collectives for TPUs; use GPUs or CPUs"
    if args.parallel_mode not in (ParallelMode.DISTRIBUTED, ParallelMode.NOT_PARALLEL):
        return (
            f"{args.n_gpu} GPUs are visible to one process, which the Trainer would use with DataParallel; "
            "start one process for each with torchrun"
        )
    if args.use_cpu and isinstance(current_device(), StreamDevice):
        return "use_cpu is given where there are GPUs; hide them with CUDA_VISIBLE_DEVICES= instead"
    return None


def check_launch(state: AcceleratorState) -> None:
    """Refuse settings that Accelerate gets from `accelerate launch` or the environment.

    Raises: ValueError.
    """
    distributed_type, dynamo_backend = state.distributed_type, state.dynamo_plugin.backend
    known = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
    if distributed_type not in known:
        raise ArgumentError(
            f"the fcdp Trainer cannot do this: Accelerate is set up for {distributed_type.value}, and one "
            "model cannot be sharded by two systems; start it with torchrun or accelerate launch --multi_gpu"
        )
    if (world := process_count()) != state.num_processes:
        # Every process would then train on the same data.
        raise ArgumentError(
            f"the fcdp Trainer cannot do this: {world} processes run, but Accelerate sees "
            f"{state.num_processes}; on a machine without GPUs, give TrainingArguments(use_cpu=True)"
        )
    if dynamo_backend is not DynamoBackend.NO:
        raise ArgumentError(
            f"the fcdp Trainer cannot do this: Accelerate was configured to compile with "
            f"{dynamo_backend.value}; unset ACCELERATE_DYNAMO_BACKEND (accelerate launch --dynamo_backend no)"
        )
