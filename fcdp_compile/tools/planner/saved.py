"""Traces on disk: tracing takes most of a plan's time, and depends on no cluster or strategy.

The files must belong to the user, in a folder that only the user can write to: they hold pickled graphs, and
reading a pickle runs its code.
"""

from __future__ import annotations

import logging
import os
import pickle
from pathlib import Path

from fcdp_compile.models.files.aside import written_aside
from fcdp_compile.tools.planner.traced import TracedGraph, TracedModel
from fcdp_compile.torch_compat.graphs import graphs_from_bytes, graphs_to_bytes

log = logging.getLogger(__name__)


def folder() -> Path:
    """The folder of saved traces: $FCDP_CACHE, or `fcdp` in the user's cache folder."""
    if given := os.environ.get("FCDP_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fcdp"


def save(traced: TracedModel, identity: str) -> None:
    """Save a trace; if the folder cannot be written, only warn: the next plan traces again."""
    # Separately, because graphs after a break may use one symbol for different sizes.
    graphs = [
        (tuple(g.graphs), graphs_to_bytes(tuple(g.graphs.values())), g.outputs)
        for g in traced.graphs
    ]
    data = pickle.dumps((traced.params, graphs, traced.calls, traced.batch))
    path = _path(identity)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with written_aside(path) as aside:
            aside.write_bytes(data)
            aside.chmod(0o600)
    except OSError as error:
        log.warning("cannot keep the trace in %s (%s); set FCDP_CACHE to a folder", path, error)


def load(identity: str) -> TracedModel | None:
    """Return a saved trace; None if there is none, or it cannot be used."""
    path = _path(identity)
    try:
        if not _is_mine(path) or not _is_mine(path.parent):
            log.warning("%s may have been written by somebody else and is not used", path)
            return None
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("cannot read the trace %s (%s)", path, error)
        return None
    try:
        params, kept, calls, batch = pickle.loads(data)
        graphs = [
            TracedGraph(
                graphs=dict(zip(directions, graphs_from_bytes(both), strict=True)), outputs=outputs
            )
            for directions, both, outputs in kept
        ]
        return TracedModel(params=params, graphs=tuple(graphs), calls=calls, batch=batch)
    # Damaged, or of another build of torch: unpickling may raise anything.
    except Exception as error:
        log.warning("cannot use the trace %s (%s), so the model is traced again", path, error)
        return None


def _path(identity: str) -> Path:
    return folder() / f"{identity}.trace"


def _is_mine(path: Path) -> bool:
    status = path.stat()
    return status.st_uid == os.getuid() and not status.st_mode & 0o022
