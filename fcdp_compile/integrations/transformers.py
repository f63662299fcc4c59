"""`transformers.Trainer` that shards instead of wrapping in DDP, and compiles with fcdp.

    from transformers import AutoModelForCausalLM, TrainingArguments
    from fcdp_compile.integrations.transformers import Trainer      # the one line that changes

    class MyTrainer(FcdpMixin, TheirTrainer): ...                   # any other Trainer

`accelerate` shards and compiles, `trainer_options` refuses arguments, `trainer_checkpoints` saves and loads.
"""

from __future__ import annotations

from fcdp_compile.extras import require

for _library in ("transformers", "accelerate", "peft"):
    require(_library, "fcdp in the Trainer of Hugging Face")

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from fcdp_compile.errors import ArgumentError
from fcdp_compile.integrations.accelerate import Accelerator
from fcdp_compile.integrations.optimizer_params import check_without_state, hold_sharded
from fcdp_compile.integrations.options import BACKEND, FcdpOptions
from fcdp_compile.integrations.trainer_checkpoints import TrainerCheckpoints
from fcdp_compile.integrations.trainer_options import check_arguments
from fcdp_compile.params.mesh import process_count
from fcdp_compile.report.explain import explain
from fcdp_compile.report.traffic import traffic
from fcdp_compile.sharding.shard import is_sharded, model_of, state_of
from fcdp_compile.torch_compat import graph_breaks

__all__ = ["FcdpMixin", "FcdpOptions", "Seq2SeqTrainer", "Trainer"]

log = logging.getLogger(__name__)

SENT = "inter_node_mib_per_step"
"""The log entry for the bytes that a node sent to others in the last step, in MiB (2**20 bytes)."""


class FcdpMixin(TrainerCheckpoints):
    """Makes a Trainer shard and compile with fcdp; put it before the Trainer's class.

    fcdp: the options; by default strategy "fcdp" on torchrun's nodes.

    The model is sharded when training, evaluation or prediction first needs it, so adapters may be added
    until then.  All ranks must call every method that runs, saves or loads the model: `train`, `evaluate`,
    `predict`, `save_model`, and `model.generate`.

    A second model that a Trainer prepares for evaluation, such as TRL's reference or teacher, is sharded too
    and frozen (`integrations.accelerate`).  An optimizer of the caller's gets the sharded parameters.

    Raises: ValueError at construction for training arguments that ask for another way to shard, to compile or
    to step (`trainer_options`).
    """

    def __init__(self, *args: Any, fcdp: FcdpOptions | None = None, **kwargs: Any) -> None:
        self.fcdp = fcdp or FcdpOptions()
        self._prepared: nn.Module | None = None
        self._watch = _StepWatch()
        super().__init__(*args, **kwargs)
        self.add_callback(self._watch)

    def create_accelerator_and_postprocess(self) -> None:
        check_arguments(self.args)
        with _unknown_backend(self.args):
            super().create_accelerator_and_postprocess()
        accelerator = Accelerator.adopt(self.accelerator, self.fcdp, self.args.torch_compile_mode)
        if self.model is not None and is_sharded(self.model):
            accelerator.share_mesh_of(self.model)

    # --- sharding and compiling ---------------------------------------------------------------------------

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        # Before `create_optimizer`, even if a subclass overrides it.
        self.sharded_model()
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
        before = {} if is_sharded(model) else dict(model.named_parameters())
        given = self._own_optimizer() if before and self.optimizer is not None else None
        if given is not None:
            check_without_state(given, before)
        # Each time, because Accelerate forgets its models at the start of every training.
        self.accelerator.prepare_model(model)
        if given is not None:
            hold_sharded(given, model, before)
        if self._prepared is not model:
            self._prepared = model
            self._watch.begin(model)
        return model

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if any(p.is_meta for p in model.parameters()):
            raise ArgumentError(
                "the model has parameters on meta, which have no values to train; call fcdp_compile.shard "
                "and then load_pretrained or materialize before the Trainer gets it"
            )
        if process_count() == 1:  # on several, shard copies each rank's part from the host
            super()._move_model_to_device(model, device)

    # --- training -----------------------------------------------------------------------------------------

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm: Any = super()._get_grad_norm(model, grad_norm=grad_norm)  # type: ignore[no-untyped-call]
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs and self._watch.sent_bytes is not None:
            logs = {**logs, SENT: self._watch.sent_bytes / 2**20}
        super().log(logs, *args, **kwargs)


class Trainer(FcdpMixin, transformers.Trainer):
    """`transformers.Trainer` on fcdp (`FcdpMixin`)."""


class Seq2SeqTrainer(FcdpMixin, transformers.Seq2SeqTrainer):
    """`transformers.Seq2SeqTrainer` on fcdp (`FcdpMixin`)."""


@contextmanager
def _unknown_backend(args: TrainingArguments) -> Iterator[None]:
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


class _StepWatch(TrainerCallback):
    """Measures the bytes of a logged step, and warns after the first step of code that was not compiled.

    sent_bytes: to other nodes in the last logged step by the node that sent most; None before the first one.
    """

    def __init__(self) -> None:
        self.sent_bytes: int | None = None
        self._breaks_before: Counter[str] = Counter()
        self._is_new = False

    def begin(self, model: nn.Module) -> None:
        """Start watching `model`, which has been sharded and is about to be compiled."""
        self._breaks_before = Counter(graph_breaks())
        self._is_new = True
        self.sent_bytes = None

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        model: nn.Module = kwargs["model"]
        self._report(model)
        # All ranks log after the same steps, and each has completed the step here.
        if control.should_log:
            self.sent_bytes = _sent_by_a_node(model)

    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self._report(kwargs["model"])

    def on_predict(self, *args: Any, **kwargs: Any) -> None:
        self._report(kwargs["model"])

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
        shown = ", ".join(found.uncovered[:5])
        more = f" and {len(found.uncovered) - 5} more" if len(found.uncovered) > 5 else ""
        parts.append(
            f"parameters in no compiled graph, which cross between nodes each time they are used: "
            f"{shown}{more}"
        )
    if breaks:
        reasons = "; ".join(f"{count} x {reason}" for reason, count in breaks.most_common())
        parts.append(
            f"graph breaks, after which compute waits for the first gathers: {reasons} "
            "(TORCH_LOGS=graph_breaks says where)"
        )
    return f"fcdp did not compile all of the model: {'; and '.join(parts)}" if parts else None


def _sent_by_a_node(model: nn.Module) -> int:
    """Return the most bytes that any node sent to others in the last step; all ranks must call it."""
    state = state_of(model)
    topology = state.topology
    mine = traffic(model).last_step.bytes("inter")
    by_node = [0] * topology.nodes
    for node, sent in state.collectives.agree([topology.node, mine]):
        by_node[node] += sent
    return max(by_node)
