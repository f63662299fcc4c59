"""Plans for a cluster that need not exist: no GPU, no weights, no process group.

model -> trace (or one that was saved) -> estimate of each strategy -> ranking
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from fcdp_compile.tools.planner.estimate import Estimate, estimate
from fcdp_compile.tools.planner.job import Job
from fcdp_compile.tools.planner.ranking import Ranking, Row, estimates, planned, rank, sensible
from fcdp_compile.tools.planner.saved import load, save
from fcdp_compile.tools.planner.source import ModelOptions, Source, find_source
from fcdp_compile.tools.planner.traced import TracedModel, trace

__all__ = [
    "Estimate",
    "Job",
    "ModelOptions",
    "Ranking",
    "Row",
    "Source",
    "TracedModel",
    "estimate",
    "estimates",
    "find_source",
    "planned",
    "rank",
    "sensible",
    "trace",
    "traced_model",
]


log = logging.getLogger(__name__)


def traced_model(
    source: Source,
    options: ModelOptions,
    *,
    cp: int = 1,
    tp: int = 1,
    note: Callable[[str], None] = lambda what: None,
) -> TracedModel:
    """Return the trace of a model, saved by an earlier plan or made now.

    cp, tp: as for `trace`; such traces are not saved, as they hold meshes.
    note: called with each stage that begins.

    Raises: FcdpError for a model that cannot be traced without data.
    """
    identity = source.identity if cp * tp == 1 else None
    traced = None if identity is None else load(identity)
    if traced is None:
        traced = trace(
            source.build, seq=options.seq, param_dtype=options.dtype, cp=cp, tp=tp, note=note
        )
        if identity is not None:
            save(traced, identity)
    if unread := traced.unread:
        log.warning(
            "%d parameters of %s, such as %r, are in no graph of its training step: code outside "
            "of the graphs may use them, and the plan does not include that code",
            len(unread),
            source.name,
            unread[0],
        )
    return traced
