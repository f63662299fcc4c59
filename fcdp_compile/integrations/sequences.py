"""Trainers whose ranks share sequences: `FcdpOptions(cp=…)`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from fcdp_compile.core.ranks.inner_mesh import CP
from fcdp_compile.errors import ArgumentError
from fcdp_compile.integrations.accelerate import Accelerator
from fcdp_compile.models.parallel.sequence import NO_TARGET, sequence_part

if TYPE_CHECKING:
    import transformers

    _Base = transformers.Trainer
else:
    _Base = object


class SequenceMixin(_Base):
    """Cuts each batch over the ranks that share sequences; losses are those of whole sequences.

    Raises: ArgumentError, with ranks that share sequences, for losses and metrics that need whole ones.
    """

    accelerator: Accelerator

    def get_cp_size(self) -> int:
        """How many ranks share a sequence; the Trainer counts batches and targets by this."""
        return self.accelerator.cp

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """The loss of this rank's part of the sequences."""
        if self.accelerator.cp > 1:
            inputs = self._part(inputs)
        return super().compute_loss(model, inputs, *args, **kwargs)

    def _part(self, inputs: Any) -> dict[str, Any]:
        """This rank's part of a batch, for the model's own loss."""
        if self.label_smoother is not None or self.compute_loss_func is not None:
            raise ArgumentError(
                "ranks that share sequences (cp) compute the model's own loss; leave compute_loss_func and "
                "label_smoothing_factor out"
            )
        return sequence_part(inputs, self.accelerator.mesh)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> Any:
        """As the Trainer's, but with ranks that share sequences only for losses, of whole sequences."""
        if self.accelerator.cp == 1:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if not prediction_loss_only:
            raise ArgumentError(
                "ranks that share sequences (cp) have logits of parts of them, so only losses are evaluated; "
                "leave compute_metrics and predict out, or set prediction_loss_only=True"
            )
        mesh = self.accelerator.mesh
        assert mesh is not None, "several ranks share a sequence"
        part = self._part(self._prepare_inputs(inputs))
        count = (part["shift_labels"] != NO_TARGET).sum()
        # Both losses are then means over this rank's targets: TRL's ignores what the batch says.
        part["num_items_in_batch"] = count.clamp(min=1)
        with torch.no_grad(), self.compute_loss_context_manager():
            mean: Any = super().compute_loss(model, part)
        # The Trainer may drop the losses of some ranks, so each has that of the whole sequences.
        both = torch.stack([mean * count, count.to(mean)])
        dist.all_reduce(both, group=mesh.get_group(CP))
        return both[0] / both[1], None, None
