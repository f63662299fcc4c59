"""TRL's Trainers that shard instead of wrapping in DDP, and compile with fcdp.

    from trl import DPOConfig
    from fcdp_compile.integrations.trl import DPOTrainer            # the one line that changes

All take `fcdp=FcdpOptions(…)`, as `integrations.transformers.Trainer` does.  Reference models and reward
models are sharded on the policy's mesh and frozen, so they cross between nodes once.  TRL's other Trainers
work by the mixin: `class MyTrainer(FcdpMixin, trl.RLOOTrainer)`.  Tried with TRL 1.16.
"""

from __future__ import annotations

from fcdp_compile.extras import require

require("trl", "fcdp in the Trainers of TRL")

from typing import TYPE_CHECKING, Any

import torch
import trl
from torch import nn

from fcdp_compile.core.sharding.shard import model_of
from fcdp_compile.integrations.options import FcdpOptions
from fcdp_compile.integrations.sequences import SequenceMixin
from fcdp_compile.integrations.transformers import FcdpMixin

__all__ = ["DPOTrainer", "FcdpOptions", "GRPOTrainer", "KTOTrainer", "RewardTrainer", "SFTTrainer"]

if TYPE_CHECKING:

    class _Preferences(FcdpMixin):
        """What `_ReferenceMixin` is put before."""

        def compute_ref_log_probs(self, model: nn.Module, inputs: Any) -> Any: ...

else:
    _Preferences = FcdpMixin


class ReferenceMixin(_Preferences):
    """Shards the model before its own log probabilities are computed ahead of training."""

    def compute_ref_log_probs(self, model: nn.Module, inputs: Any) -> Any:
        """Compute as TRL; the policy, which TRL takes unprepared here, is sharded and compiled first."""
        prepared = self.sharded_model() if model_of(model) is self.model else model
        return super().compute_ref_log_probs(prepared, inputs)


class SFTTrainer(SequenceMixin, FcdpMixin, trl.SFTTrainer):
    """`trl.SFTTrainer` on fcdp."""

    _total_train_tokens: int

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """As TRL's, with the tokens of whole sequences in `num_tokens`."""
        cp, before = self.accelerator.cp, self._total_train_tokens
        found = super().compute_loss(model, inputs, *args, **kwargs)
        if cp > 1 and self._total_train_tokens > before:  # TRL has counted those of one row's part
            mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
            count = positions.size(1) if mask is None else mask.sum()
            counted = torch.as_tensor(count, device=found.device)
            everywhere = self.accelerator.gather_for_metrics(counted)
            self._total_train_tokens = before + int(everywhere.sum()) // cp
            self._metrics["train"]["num_tokens"] = [self._total_train_tokens]
        return found


class DPOTrainer(ReferenceMixin, trl.DPOTrainer):
    """`trl.DPOTrainer` on fcdp."""


class KTOTrainer(ReferenceMixin, trl.KTOTrainer):
    """`trl.KTOTrainer` on fcdp."""


class RewardTrainer(FcdpMixin, trl.RewardTrainer):
    """`trl.RewardTrainer` on fcdp."""


class GRPOTrainer(FcdpMixin, trl.GRPOTrainer):
    """`trl.GRPOTrainer` on fcdp."""

    samples = True
