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

from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

import torch
import trl
from torch import nn
from trl.generation.vllm_generation import VLLMGeneration

from fcdp_compile.core.sharding.shard import model_of
from fcdp_compile.integrations.options import FcdpOptions
from fcdp_compile.integrations.sequences import SequenceMixin
from fcdp_compile.integrations.transformers import FcdpMixin
from fcdp_compile.models.pretrained.exporting.streaming import stream_state

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


class StreamedGeneration(VLLMGeneration):
    """TRL's generation by a server of vLLM, which gets the weights of a sharded model."""

    def sync_weights(self) -> None:
        """Send the model's whole tensors to the server, bucket by bucket; all ranks call it."""
        is_main = self.accelerator.is_main_process
        with closing(stream_state(self.model)) as stream, ExitStack() as update:
            for i, bucket in enumerate(stream):
                if is_main and i == 0:  # within the loop, so that an error reaches the other ranks
                    update.enter_context(self.vllm_client.weight_update())
                if is_main:
                    told = [
                        (n, str(t.dtype).removeprefix("torch."), list(t.shape)) for n, t in bucket
                    ]
                    self.vllm_client.update_named_params(told, iter(bucket))
        if is_main:
            self.vllm_client.reset_prefix_cache()


class GRPOTrainer(FcdpMixin, trl.GRPOTrainer):
    """`trl.GRPOTrainer` on fcdp; with `use_vllm` and `vllm_mode="server"`, vLLM generates."""

    samples = True
    streams = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.use_vllm:
            self.vllm_generation.__class__ = StreamedGeneration
