"""The training arguments that the Trainer of `integrations.transformers` refuses."""

from __future__ import annotations

from transformers import TrainingArguments
from transformers.training_args import OptimizerNames, ParallelMode

from fcdp_compile.devices import StreamDevice, current_device
from fcdp_compile.errors import ArgumentError
from fcdp_compile.integrations.options import BACKEND, FcdpOptions

__all__ = ["FcdpOptions", "check_arguments"]

_STEPS_IN_BACKWARD = (
    OptimizerNames.LOMO,
    OptimizerNames.ADALOMO,
    OptimizerNames.GALORE_ADAMW_LAYERWISE,
    OptimizerNames.GALORE_ADAMW_8BIT_LAYERWISE,
    OptimizerNames.GALORE_ADAFACTOR_LAYERWISE,
    OptimizerNames.APOLLO_ADAMW_LAYERWISE,
)
"""Optimizers that step each parameter in a hook as soon as its gradient arrives, before it is reduced."""

_ROLLOUTS = (
    "{} is given, with which TRL reads the weights of a sharded model as if each rank held all of them; "
    "leave it out, so that the processes that train also generate, or send "
    "fcdp_compile.stream_state(model) to an engine of your own"
)
"""Of TRL's ways to generate.  vLLM gets `param.data` of each parameter, and with continuous batching each
rank runs the model as often as its own requests need.
"""


def check_arguments(args: TrainingArguments) -> None:
    """Refuse training arguments that ask for another way to shard, to compile or to step.

    Raises: ValueError, which says what to change.
    """
    problem = _problem(args)
    if problem is not None:
        raise ArgumentError(f"the fcdp Trainer cannot do this: {problem}")


def _problem(args: TrainingArguments) -> str | None:
    for name in ("deepspeed", "fsdp"):
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
    for name in ("use_vllm", "use_transformers_continuous_batching"):
        if getattr(args, name, False):
            return _ROLLOUTS.format(name)
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
