"""Write what was compiled to a folder, for people and for `fcdp dump`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist
from torch.fx import GraphModule

from fcdp_compile.plan import Direction, Plan, Variant
from fcdp_compile.plan_json import write_plan

log = logging.getLogger(__name__)


class Dump:
    """A folder of plans and printed graphs; only rank 0 writes, the plans being the same everywhere."""

    def __init__(self, folder: Path, model_number: int) -> None:
        self._folder = folder
        self._has_failed = False
        self._prefix = "graph" if model_number == 0 else f"model-{model_number}-graph"

    def write(
        self,
        plan: Plan,
        graphs: Mapping[tuple[Direction, Variant], GraphModule],
        *,
        again: bool = False,
    ) -> None:
        """Write one plan and its graphs; the first of a model removes what an earlier run left.

        again: the plan was written before and has more schedules now.

        A folder that cannot be written is warned of once: an error would stop rank 0 alone.
        """
        if self._has_failed or (dist.is_initialized() and dist.get_rank() != 0):
            return
        try:
            if plan.graph == 0 and not again:
                self._remove_older()
            self._write(plan, graphs)
        except OSError as error:
            self._has_failed = True
            log.warning(
                "cannot write plans to the folder %s (%s); training goes on without them, set the option "
                "dump or FCDP_DUMP to a folder that this process may write",
                self._folder,
                error,
            )

    def _remove_older(self) -> None:
        for old in self._folder.glob(f"{self._prefix}-[0-9][0-9][0-9].*"):
            old.unlink()

    def _write(self, plan: Plan, graphs: Mapping[tuple[Direction, Variant], GraphModule]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        stem = f"{self._prefix}-{plan.graph:03d}"
        write_plan(self._folder / f"{stem}.plan.json", plan)
        for (direction, variant), gm in graphs.items():
            text = gm.print_readable(print_output=False)
            path = self._folder / f"{stem}.{direction.value}.{variant.value}.txt"
            path.write_text(text, encoding="utf-8")
