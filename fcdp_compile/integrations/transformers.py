"""`transformers.Trainer` that shards instead of wrapping in DDP, and compiles with fcdp.

    from transformers import AutoModelForCausalLM, TrainingArguments
    from fcdp_compile.integrations.transformers import Trainer      # the one line that changes

    class MyTrainer(FcdpMixin, TheirTrainer): ...                   # any other Trainer

`accelerate` shards and compiles, `check_arguments` refuses arguments, `trainer_checkpoints` saves and loads.
"""

from __future__ import annotations

from fcdp_compile.extras import require

for _library in ("transformers", "accelerate", "peft"):
    require(_library, "fcdp in the Trainer of Hugging Face")

import functools
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import Any, ClassVar

import torch
import transformers
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.training_args import OptimizerNames, ParallelMode

from fcdp_compile.core.params.mesh import process_count
from fcdp_compile.core.sharding.shard import is_sharded, model_of, state_of
from fcdp_compile.devices import StreamDevice, current_device
from fcdp_compile.errors import ArgumentError
from fcdp_compile.integrations.accelerate import Accelerator
from fcdp_compile.integrations.optimizer_params import sharded_within
from fcdp_compile.integrations.options import BACKEND, FcdpOptions
from fcdp_compile.integrations.sequences import SequenceMixin
from fcdp_compile.integrations.trainer_checkpoints import TrainerCheckpoints
from fcdp_compile.tools.report import ExposedWait, explain, exposed_wait, first_of, traffic
from fcdp_compile.torch_compat.compilers import graph_breaks

__all__ = ["FcdpMixin", "FcdpOptions", "Seq2SeqTrainer", "Trainer"]

log = logging.getLogger(__name__)

SENT = "inter_node_mib_per_step"
"""The log entry for the bytes that a node sent to others in the last step, in MiB (2**20 bytes)."""

WAITED = "exposed_wait_ms_per_step"
"""The log entry for how long compute waited for transfers in the last step, the longest of all ranks."""

MFU = "mfu"
"""The log entry for the model FLOPs utilisation since the last entry; only with `FcdpOptions.peak_tflops`."""

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
    "leave it out, so that the processes that train also generate, give GRPOTrainer a server of vLLM "
    "(vllm_mode='server'), or send fcdp_compile.stream_state(model, changes=True) to an engine of your own"
)
"""Of TRL's ways to generate.  vLLM gets `param.data` of each parameter, and with continuous batching each
rank runs the model as often as its own requests need.
"""


class FcdpMixin(TrainerCheckpoints):
    """Makes a Trainer shard and compile with fcdp; put it before the Trainer's class.

    fcdp: the options; by default strategy "fcdp" on torchrun's nodes.

    The model is sharded when training, evaluation or prediction first needs it, so adapters may be added
    until then.  All ranks must call every method that runs, saves or loads the model: `train`, `evaluate`,
    `predict`, `save_model`, and `model.generate`.

    A second model that a Trainer prepares for evaluation, such as TRL's reference or teacher, is sharded too
    and frozen (`integrations.accelerate`).  An optimizer of the caller's gets the sharded parameters.

    Raises: ValueError at construction for training arguments that ask for another way to shard, to compile or
    to step (`check_arguments`), and for a model within the wrapper of torch.compile.
    """

    accelerator: Accelerator
    samples: ClassVar[bool] = False
    """Whether each rank makes batches of its own, as those do that learn from what the model generates."""

    streams: ClassVar[bool] = False
    """Whether it sends whole weights to a server of vLLM."""

    def __init__(self, *args: Any, fcdp: FcdpOptions | None = None, **kwargs: Any) -> None:
        self.fcdp = fcdp or FcdpOptions()
        self._prepared: nn.Module | None = None
        self._watch = _StepWatch()
        self._logged: tuple[float, float] | None = None  # when, and the FLOPs until then
        super().__init__(*args, **kwargs)
        self.add_callback(self._watch)

    def create_accelerator_and_postprocess(self) -> None:
        check_arguments(self.args, streams=self.streams)
        if self.model is not None and model_of(self.model) is not self.model:
            raise ArgumentError(
                "the model is wrapped by torch.compile, which hides its arguments from the Trainer; hand "
                "over the model itself, and the Trainer compiles it"
            )
        self.fcdp = self.fcdp.with_parallelism(self.args.parallelism_config)
        if self.fcdp.tp != 1 and self.samples:
            raise ArgumentError(
                f"{type(self).__name__} samples its batches on each rank, so ranks cannot share parameters "
                f"(tp={self.fcdp.tp}); leave tp out"
            )
        if self.fcdp.cp != 1 and not isinstance(self, SequenceMixin):
            raise ArgumentError(
                f"{type(self).__name__} cannot train on parts of sequences (cp={self.fcdp.cp}); "
                "integrations.transformers.Trainer and integrations.trl.SFTTrainer can"
            )
        with _hidden_from_accelerate(self.args):
            super().create_accelerator_and_postprocess()
        accelerator = Accelerator.adopt(self.accelerator, self.fcdp, self.args.torch_compile_mode)
        # The Trainer has taken the method that the Accelerator had before.
        self.gather_function = functools.partial(
            accelerator.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object
        )
        if self.model is not None and is_sharded(self.model):
            accelerator.share_mesh_of(self.model)

    # --- sharding and compiling ---------------------------------------------------------------------------

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        # Before `create_optimizer`, even if a subclass overrides it.
        self.sharded_model()
        self._logged = None
        return super()._inner_training_loop(*args, **kwargs)

    def _wrap_model(
        self, model: nn.Module, training: bool = True, dataloader: Any = None
    ) -> nn.Module:
        """Return the sharded and compiled model, for training and evaluation."""
        if model_of(model) is not self.model:
            wrapped: nn.Module = super()._wrap_model(model, training, dataloader)
            return wrapped
        return self.sharded_model()

    def sharded_model(self) -> nn.Module:
        """Return `self.model`; shard and compile it first if that has not been done."""
        model = self.model
        assert model is not None, "a Trainer has a model or has made one by now"
        if self._prepared not in (None, model):
            self._let_go(model)
        given = [] if self.optimizer is None else [self._own_optimizer()]
        with sharded_within(given, model):
            # Each time, because Accelerate forgets its models at the start of every training.
            self.accelerator.prepare_model(model)
        if self._prepared is not model:
            self._prepared = model
            self._watch.begin(model)
        return model

    def _let_go(self, model: nn.Module) -> None:
        """Free the model before this one (`model_init`): this one gets its host memory."""
        self._prepared = None
        self.callback_handler.model = self.model_wrapped = model
        self.accelerator.free_memory()

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if any(p.is_meta for p in model.parameters()):
            raise ArgumentError(
                "the model has parameters on meta, which have no values to train; call fcdp_compile.shard "
                "and then load_pretrained or materialize before the Trainer gets it"
            )
        if process_count() == 1:  # on several, shard copies each rank's part from the host
            super()._move_model_to_device(model, device)

    # --- training -----------------------------------------------------------------------------------------

    def get_tp_size(self) -> int:
        """How many ranks share each parameter; the Trainer counts batches and targets by this."""
        return self.accelerator.tp

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """This rank's part of the operations of a batch."""
        return super().floating_point_ops(inputs) // self.accelerator.sharers

    def _track_num_input_tokens(self, inputs: Any) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)  # type: ignore[no-untyped-call]
        added = self.state.num_input_tokens_seen - before  # by all ranks
        self.state.num_input_tokens_seen = before + added // self.accelerator.sharers

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm: Any = super()._get_grad_norm(model, grad_norm=grad_norm)  # type: ignore[no-untyped-call]
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            logs = {**logs, **self._watch.figures, **self._utilisation()}
        super().log(logs, *args, **kwargs)

    def _utilisation(self) -> dict[str, float]:
        """The model FLOPs utilisation of all GPUs since the last entry, as Transformers counts FLOPs."""
        now, before = (perf_counter(), self.state.total_flos), self._logged
        self._logged = now
        if self.fcdp.peak_tflops is None or before is None:
            return {}
        seconds, flops = (b - a for a, b in zip(before, now, strict=True))
        return {MFU: flops / seconds / (self.fcdp.peak_tflops * 1e12 * process_count())}


class Trainer(SequenceMixin, FcdpMixin, transformers.Trainer):
    """`transformers.Trainer` on fcdp (`FcdpMixin`)."""


class Seq2SeqTrainer(FcdpMixin, transformers.Seq2SeqTrainer):
    """`transformers.Seq2SeqTrainer` on fcdp (`FcdpMixin`)."""


@contextmanager
def _hidden_from_accelerate(args: TrainingArguments) -> Iterator[None]:
    """Hide from Accelerate what fcdp does: Accelerate raises for its backend, and for cp without FSDP."""
    given = {name: getattr(args, name) for name in ("torch_compile_backend", "parallelism_config")}
    if given["torch_compile_backend"] != BACKEND:
        del given["torch_compile_backend"]
    for name in given:
        setattr(args, name, None)
    try:
        yield
    finally:
        for name, value in given.items():
            setattr(args, name, value)


class _StepWatch(TrainerCallback):
    """Measures each logged step, and warns after the first step of code that was not compiled.

    figures: the log entries of the last logged step; empty before the first one.
    """

    def __init__(self) -> None:
        self.figures: dict[str, float] = {}
        self._breaks_before: Counter[str] = Counter()
        self._is_new = False
        self._measuring = ExitStack()
        self._wait: ExposedWait | None = None

    def begin(self, model: nn.Module) -> None:
        """Start watching `model`, which has been sharded and is about to be compiled."""
        self._breaks_before = Counter(graph_breaks())
        self._is_new = True
        self.figures = {}

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._measuring.close()  # of a step that has failed
        step = state.global_step + 1
        # The same on all ranks, as the Trainer's own decision to log.
        if step == 1 or (state.logging_steps and step % state.logging_steps == 0):
            self._wait = self._measuring.enter_context(exposed_wait(kwargs["model"]))

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        model: nn.Module = kwargs["model"]
        self._measuring.close()
        wait, self._wait = self._wait, None
        self._report(model)
        # All ranks log after the same steps, and each has completed the step here.
        if control.should_log:
            self.figures = _figures(model, wait)

    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self._report(kwargs["model"])

    on_predict = on_evaluate

    def _report(self, model: nn.Module) -> None:
        if not self._is_new:
            return
        self._is_new = False
        problem = what_was_not_compiled(model, self._breaks_before)
        if problem is not None and state_of(model).topology.position.rank == 0:
            log.warning("%s", problem)


def what_was_not_compiled(model: nn.Module, breaks_before: Counter[str]) -> str | None:
    """Return which parts of a model are in no graph after a step, and why; None if all are in graphs.

    breaks_before: graph breaks that this process had before the model was compiled, by reason.
    """
    found = explain(model)
    if not found.passes:
        return (
            "fcdp compiled nothing of the model: every parameter crosses between nodes at each use, and "
            "nothing overlaps; run with TORCH_LOGS=graph_breaks,recompiles,dynamo to see why"
        )
    breaks = Counter(dict(found.graph_breaks)) - breaks_before
    parts = []
    if found.uncovered:
        parts.append(
            f"parameters in no compiled graph, which cross between nodes each time they are used: "
            f"{first_of(found.uncovered)}"
        )
    if breaks:
        reasons = "; ".join(f"{count} x {reason}" for reason, count in breaks.most_common())
        parts.append(
            f"graph breaks, after which compute waits for the first gathers: {reasons} "
            "(TORCH_LOGS=graph_breaks says where)"
        )
    return f"fcdp did not compile all of the model: {'; and '.join(parts)}" if parts else None


def _figures(model: nn.Module, wait: ExposedWait | None) -> dict[str, float]:
    """The log entries of a step; all ranks must call it.  wait: None if the step was not measured."""
    state = state_of(model)
    topology = state.topology
    sent = traffic(model).last_step.bytes("inter")
    waited_us = -1 if wait is None else round(wait.seconds * 1e6)
    mine = [topology.node, sent, waited_us]
    by_node, longest_us = [0] * topology.nodes, -1
    for node, sent_bytes, microseconds in state.collectives.agree(mine, group=topology.everyone):
        by_node[node] += sent_bytes
        longest_us = max(longest_us, microseconds)
    found = {SENT: max(by_node) / 2**20}
    return found if longest_us < 0 else {**found, WAITED: longest_us / 1e3}


def check_arguments(args: TrainingArguments, *, streams: bool) -> None:
    """Refuse training arguments that ask for another way to shard, to compile or to step.

    streams: as `FcdpMixin.streams`.

    Raises: ValueError, which says what to change.
    """
    problem = _problem(args, streams=streams)
    if problem is not None:
        raise ArgumentError(f"the fcdp Trainer cannot do this: {problem}")


def _problem(args: TrainingArguments, *, streams: bool) -> str | None:
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
        has_server = name == "use_vllm" and streams and getattr(args, "vllm_mode", None) == "server"
        if getattr(args, name, False) and not has_server:
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
