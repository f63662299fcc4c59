"""Plans for a cluster that is not there: no GPU, no weights, no process group.

model -> trace (or one that was saved) -> estimate of each strategy -> ranking
"""

from __future__ import annotations

from fcdp_compile.planner.estimate import Estimate, estimate
from fcdp_compile.planner.job import Job
from fcdp_compile.planner.ranking import Ranking, Row, estimates, rank, sensible
from fcdp_compile.planner.saved import load, save
from fcdp_compile.planner.source import ModelOptions, Source, find_source
from fcdp_compile.planner.traced import TracedModel, trace

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
    "rank",
    "sensible",
    "trace",
    "traced_model",
]


def traced_model(source: Source, options: ModelOptions) -> TracedModel:
    """The trace of a model, kept from an earlier plan or made now.

    Raises: FcdpError for a model that cannot be traced without data.
    """
    if source.identity is not None and (kept := load(source.identity)) is not None:
        return kept
    traced = trace(source.build, seq=options.seq, param_dtype=options.dtype)
    if source.identity is not None:
        save(traced, source.identity)
    return traced
