"""Trainers of `trl.experimental` on fcdp; importing them warns, as TRL's own do, that they may change."""

from __future__ import annotations

from fcdp_compile.extras import require
from fcdp_compile.integrations.transformers import FcdpMixin

require("trl", "fcdp in the Trainers of TRL")

from trl.experimental import gkd  # noqa: E402  # after the sentence for those who lack it

__all__ = ["GKDTrainer"]


class GKDTrainer(FcdpMixin, gkd.GKDTrainer):
    """`trl.experimental.gkd.GKDTrainer` on fcdp; the teacher crosses between nodes once."""
