"""Trainers of `trl.experimental` on fcdp; importing them warns, as TRL's own do, that they may change."""

from __future__ import annotations

from fcdp_compile.extras import require

require("trl", "fcdp in the Trainers of TRL")

from trl.experimental import gkd

from fcdp_compile.integrations.transformers import FcdpMixin

__all__ = ["GKDTrainer"]


class GKDTrainer(FcdpMixin, gkd.GKDTrainer):
    """`trl.experimental.gkd.GKDTrainer` on fcdp; the teacher crosses between nodes once."""

    samples = True
