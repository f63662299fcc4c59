"""Write plans and graphs to a folder, for people and for `fcdp dump`, and to torch's structured trace."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch.distributed as dist
from torch.fx import GraphModule

from fcdp_compile.plan import Direction, Plan, Variant
from fcdp_compile.plan.json import to_json, write_plan
from fcdp_compile.plan.recording import SUFFIX, Recording, write_recordings
from fcdp_compile.plan.stages import SUFFIX as STAGES_SUFFIX
from fcdp_compile.plan.stages import Stage, write_stages
from fcdp_compile.torch_compat.compilers import trace_artifact

log = logging.getLogger(__name__)


Graphs = Mapping[tuple[Direction, Variant], GraphModule]


def trace(plan: Plan, graphs: Graphs) -> None:
    """Add a plan and its graphs to the trace of torch's own tools (TORCH_TRACE, tlparse)."""
    trace_artifact(f"fcdp_plan_{plan.graph}", lambda: to_json(plan))
    for (direction, variant), gm in graphs.items():
        name = f"fcdp_graph_{plan.graph}_{direction.value}_{variant.value}"
        trace_artifact(name, partial(gm.print_readable, print_output=False))


class Dump:
    """A folder of plans, printed graphs and recordings; only rank 0 writes, as all ranks have equal plans.

    If the folder cannot be written, fcdp only warns, once, because an error would stop rank 0 alone.
    """

    def __init__(self, folder: Path, model_number: int) -> None:
        self._folder = folder
        # Decided now: at exit, when the last recording is written, the process group may be gone.
        self._is_writer = not dist.is_initialized() or dist.get_rank() == 0
        self._has_failed = False
        self._prefix = "graph" if model_number == 0 else f"model-{model_number}-graph"

    def write(
        self,
        plan: Plan,
        graphs: Graphs,
        stages: Sequence[Stage],
        *,
        again: bool = False,
    ) -> None:
        """Write one plan, its graphs and the graphs after each pass.

        The first plan of a model removes the files of an earlier run.

        again: the plan was written before and has more schedules now.
        """
        is_first = plan.graph == 0 and not again
        self._try(partial(self._write, plan, graphs, stages, is_first=is_first))

    def write_recordings(self, plan: Plan, recordings: Sequence[Recording]) -> None:
        """Write the recordings of a plan that was written before."""
        path = self._folder / f"{self._stem(plan)}{SUFFIX}"
        self._try(partial(write_recordings, path, recordings))

    def _try(self, write: Callable[[], None]) -> None:
        if self._has_failed or not self._is_writer:
            return
        try:
            write()
        except OSError as error:
            self._has_failed = True
            log.warning(
                "cannot write plans and recordings to the folder %s (%s); training goes on without them, set "
                "the option dump or FCDP_DUMP to a folder that this process may write",
                self._folder,
                error,
            )

    def _write(
        self, plan: Plan, graphs: Graphs, stages: Sequence[Stage], *, is_first: bool
    ) -> None:
        if is_first:
            for old in self._folder.glob(f"{self._prefix}-[0-9][0-9][0-9].*"):
                old.unlink()
        self._folder.mkdir(parents=True, exist_ok=True)
        stem = self._stem(plan)
        write_plan(self._folder / f"{stem}.plan.json", plan)
        write_stages(self._folder / f"{stem}{STAGES_SUFFIX}", tuple(stages))
        for (direction, variant), gm in graphs.items():
            text = gm.print_readable(print_output=False)
            path = self._folder / f"{stem}.{direction.value}.{variant.value}.txt"
            path.write_text(text, encoding="utf-8")

    def _stem(self, plan: Plan) -> str:
        return f"{self._prefix}-{plan.graph:03d}"
