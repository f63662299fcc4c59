"""The Trainer's checkpoints: its usual files, and beside them a checkpoint that any layout loads.

    checkpoint-500/
      model.safetensors, config.json, …   files for from_pretrained (`save_pretrained`); of PEFT, adapters
      fcdp/                               model, optimizer, scheduler, generators (`fcdp_compile.save`);
                                          for a model with adapters without frozen parameters
      trainer_state.json                  the Trainer's, written last: a checkpoint without it is incomplete

No pickle is loaded.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from accelerate.utils import broadcast_object_list
from peft import PeftModel
from torch import nn
from transformers import TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME

from fcdp_compile.core.ranks.messages import together
from fcdp_compile.core.sharding.shard import state_of
from fcdp_compile.errors import ArgumentError, CheckpointError
from fcdp_compile.integrations.options import FcdpOptions
from fcdp_compile.models.checkpointing.contents import JobObjects, rng_state, set_rng_state
from fcdp_compile.models.checkpointing.format.disk import Disk
from fcdp_compile.models.checkpointing.format.record import RECORD
from fcdp_compile.models.checkpointing.loading import load
from fcdp_compile.models.checkpointing.saving import save
from fcdp_compile.models.pretrained.exporting.export import save_pretrained
from fcdp_compile.models.pretrained.huggingface import has_adapters
from fcdp_compile.models.pretrained.load import load_pretrained
from fcdp_compile.models.survival.keeper import Keeper, open_keeper

if TYPE_CHECKING:

    class _Base(transformers.Trainer):
        """What `FcdpMixin` brings together."""

        def sharded_model(self) -> nn.Module:
            """Return `self.model`, sharded by now; `FcdpMixin` has it."""
            ...

else:
    _Base = object

log = logging.getLogger(__name__)

FOLDER = "fcdp"
"""The folder within a checkpoint that `fcdp_compile.save` writes."""

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


class TrainerCheckpoints(_Base):
    """The part of `FcdpMixin` that saves and loads; all ranks must call its methods."""

    fcdp: FcdpOptions

    _generators: dict[str, Any] | None = None
    """The states of this rank's generators right after the checkpoint was loaded."""

    _keeper: Keeper | None = None
    """Keeps each step in the memory of the nodes, during a training that shall survive."""

    _begins: _Begins | None = None
    """What loads a step from the memory of the nodes, if there is one."""

    # --- saving -------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write files for `from_pretrained`; every rank must call it (`fcdp_compile.save_pretrained`)."""
        model = self.sharded_model()
        folder = output_dir or self.args.output_dir
        assert folder is not None, "a Trainer has an output folder"
        if _internal_call and self.args.save_only_model:
            # An earlier run may have left its own full checkpoint there, which a load would prefer.
            together(state_of(model).topology.everyone, lambda: self._remove_rest(Path(folder)))
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        save_pretrained(model, folder, tokenizer=tokenizer)
        together(state_of(model).topology.everyone, lambda: self._save_arguments(Path(folder)))
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _remove_rest(self, folder: Path) -> None:
        rest = folder / FOLDER
        if self.args.should_save and rest.is_dir():
            (rest / RECORD).unlink(missing_ok=True)
            Disk().sweep(rest)  # all data, as no record names any
            if not any(rest.iterdir()):
                rest.rmdir()

    def _save_arguments(self, folder: Path) -> None:
        # For people and for the hub, as the Trainer does; fcdp never reads it.
        if self.args.should_save:
            torch.save(self.args, folder / TRAINING_ARGS_NAME)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save everything that is needed to continue, generators and the gradient scaler too."""
        save(
            Path(output_dir, FOLDER),
            model=self.sharded_model(),
            optimizer=self._own_optimizer(),
            scheduler=self.lr_scheduler,
            scaler=self.accelerator.scaler,
            step=self.state.global_step,
            # The script loads the base from elsewhere, also when it resumes.
            frozen=not has_adapters(self.sharded_model()),
        )

    def _save_scaler(self, output_dir: str) -> None:
        """Do nothing: `_save_optimizer_and_scheduler` saves the scaler."""

    def _save_rng_state(self, output_dir: str) -> None:
        """Do nothing: `_save_optimizer_and_scheduler` saves the generators."""

    # --- loading ------------------------------------------------------------------------------------------

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Train as `transformers.Trainer.train`; True resumes from the last checkpoint that is complete."""
        if resume_from_checkpoint is True:
            assert self.args.output_dir is not None, "a Trainer has an output folder"
            found = [_last_whole(Path(self.args.output_dir))]
            resume_from_checkpoint, problem = broadcast_object_list(found)[0]
            if problem is not None:
                raise CheckpointError(problem)
            if resume_from_checkpoint is None:
                raise ArgumentError(
                    f"no checkpoint of {self.args.output_dir} was saved completely, so there is nothing "
                    "to resume from; leave resume_from_checkpoint out, or name a folder"
                )
        self._generators = None
        every = self.fcdp.survive
        if every is None:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        keeper = open_keeper(self.sharded_model(), every=every, job=None)
        begins = _Begins(self, keeper)
        self.add_callback(begins)
        try:
            with keeper, tempfile.TemporaryDirectory() as folder:
                if (extra := keeper.peek()) is not None:
                    resume_from_checkpoint = folder
                    Path(folder, TRAINER_STATE_NAME).write_text(extra[_STATE])
                    self._begins = begins
                self._keeper = keeper
                return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self.remove_callback(begins)
            self._keeper = self._begins = None

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **kwargs)
        keeper = self._keeper
        if (
            keeper is not None and self.state.global_step > keeper.step
        ):  # not at the end of an epoch
            text = json.dumps(dataclasses.asdict(self.state), sort_keys=True)
            keeper.commit(extra={_STATE: text})

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        if self._begins is not None:  # `_load_optimizer_and_scheduler` loads all
            return
        # `_load_optimizer_and_scheduler` loads a complete checkpoint, the model together with the optimizer.
        if not self._is_whole(resume_from_checkpoint):
            self._load_weights(resume_from_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        model = self.sharded_model()
        if self._begins is not None:
            self._begins.begin()
            self._generators = rng_state(state_of(model).device.torch)
            return
        if not self._is_whole(checkpoint):
            if self.args.process_index == 0:
                log.warning(
                    "%s has weights and no folder %r (save_only_model?): the optimizer, the learning rate's "
                    "schedule and the random number generators start anew",
                    checkpoint,
                    FOLDER,
                )
            return
        loaded = load(
            Path(checkpoint, FOLDER),
            model=model,
            optimizer=self._own_optimizer(),
            scheduler=self.lr_scheduler,
            scaler=self.accelerator.scaler,
        )
        if loaded.step != self.state.global_step:
            raise CheckpointError(
                f"{checkpoint} holds the state of step {loaded.step}, but its {TRAINER_STATE_NAME} says "
                f"{self.state.global_step}; resume from another checkpoint"
            )
        self._generators = rng_state(state_of(model).device.torch)

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Do nothing: `_load_optimizer_and_scheduler` loads the scaler."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        # The Trainer calls this after it has skipped the data of earlier steps, which draws random numbers.
        if self._generators is not None:
            set_rng_state(self._generators, state_of(self.sharded_model()).device.torch)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        assert best is not None, "the Trainer looks before it calls"
        log.info("loading the best model, of %s (score: %s)", best, self.state.best_metric)
        if not self._is_whole(best):
            self._load_weights(best)
            return
        model = self.sharded_model()
        device = state_of(model).device.torch
        now = rng_state(device)
        load(Path(best, FOLDER), model=model)
        set_rng_state(now, device)

    def _load_weights(self, checkpoint: str) -> None:
        """Load weights that `save_model`, or another Trainer, has written."""
        model = self.sharded_model()
        if isinstance(model, PeftModel):
            # PEFT knows the file of each adapter, and loads whole values with `load_state_dict`.
            super()._load_from_checkpoint(checkpoint, model)
        else:
            load_pretrained(model, checkpoint)

    def _is_whole(self, checkpoint: str) -> bool:
        """Whether a checkpoint has more than weights; ranks agree on it, because collectives follow.

        Raises: CheckpointError on every rank if ranks see different files.
        """
        state = state_of(self.sharded_model())
        seen = together(state.topology.everyone, lambda: Path(checkpoint, FOLDER).is_dir())
        if len(set(seen)) > 1:
            raise CheckpointError(
                f"rank {seen.index(False)} does not see {Path(checkpoint, FOLDER)}, but other ranks do; "
                "resume from a folder that all nodes share"
            )
        return seen[0]

    def _own_optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer without Accelerate's wrapper, which does not own the parameters."""
        optimizer: Any = self.optimizer
        own: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
        return own


_STATE = "trainer_state"


class _Begins(TrainerCallback):
    """Lets a keeper begin once the Trainer's optimizer is made; it loads what the nodes' memory has."""

    def __init__(self, trainer: TrainerCheckpoints, keeper: Keeper) -> None:
        self._trainer, self._keeper = trainer, keeper
        self._has_begun = False

    def begin(self) -> None:
        """Load the step that the Trainer's state is of.

        Raises: CheckpointError on every rank if that step is damaged.
        """
        self._has_begun = True
        trainer = self._trainer
        objects = JobObjects(
            optimizer=trainer._own_optimizer(),
            scheduler=trainer.lr_scheduler,
            scaler=trainer.accelerator.scaler,
            extra=None,
        )
        self._keeper.begin(objects, None)
        if self._keeper.step != trainer.state.global_step:
            raise CheckpointError(
                f"step {trainer.state.global_step} in the memory of the nodes is damaged; remove the memory "
                "with `fcdp clean` on every node, and resume from a checkpoint"
            )

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        if not self._has_begun:
            self._keeper.step = self._trainer.state.global_step
            self.begin()


def last_whole_checkpoint(folder: Path) -> str | None:
    """Return the last complete checkpoint in a Trainer's folder; None if there is none."""
    found = {
        int(match[1]): path
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (match := _CHECKPOINT.fullmatch(path.name)) and _has_state(path)
    }
    return str(found[max(found)]) if found else None


def _last_whole(folder: Path) -> tuple[str | None, str | None]:
    """Return the last complete checkpoint, or the problem that prevented the search, for rank 0 to share."""
    try:
        return last_whole_checkpoint(folder), None
    except OSError as error:
        return None, f"cannot look for checkpoints in {folder}: {error.strerror}"


def _has_state(checkpoint: Path) -> bool:
    try:
        json.loads((checkpoint / TRAINER_STATE_NAME).read_text())
    except (OSError, ValueError):
        return False
    return True
