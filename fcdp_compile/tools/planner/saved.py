"""Traces on disk: tracing takes most of a plan's time, and depends on no cluster or strategy.

The files must belong to the user, in a folder that only the user can write to: they hold pickled graphs, and
reading a pickle runs its code.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fcdp_compile.models.files.aside import written_aside
from fcdp_compile.tools.planner.traced import TracedGraph, TracedModel, TracedParam
from fcdp_compile.torch_compat import graphs_from_bytes, graphs_to_bytes

log = logging.getLogger(__name__)

_DTYPES = ("dtype", "gather_dtype")


def folder() -> Path:
    """The folder of saved traces: $FCDP_CACHE, or `fcdp` in the user's cache folder."""
    if given := os.environ.get("FCDP_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fcdp"


def save(traced: TracedModel, identity: str) -> None:
    """Save a trace; if the folder cannot be written, only warn: the next plan traces again."""
    about = [
        {k: str(v).removeprefix("torch.") if k in _DTYPES else v for k, v in asdict(p).items()}
        for p in traced.params
    ]
    # Separately, because graphs after a break may use one symbol for different sizes.
    pairs = [graphs_to_bytes((g.forward, g.backward)) for g in traced.graphs]
    described = [
        {"outputs": g.outputs, "bytes": len(p)} for g, p in zip(traced.graphs, pairs, strict=True)
    ]
    header = json.dumps({"params": about, "graphs": described, "batch": traced.batch}).encode()
    path = _path(identity)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with written_aside(path) as aside:
            aside.write_bytes(b"".join([header, b"\n", *pairs]))
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
        header, _, data = path.read_bytes().partition(b"\n")
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("cannot read the trace %s (%s)", path, error)
        return None
    try:
        return _restored(json.loads(header), data)
    except (
        Exception
    ) as error:  # damaged, or of another build of torch: unpickling may raise anything
        log.warning("cannot use the trace %s (%s), so the model is traced again", path, error)
        return None


def _path(identity: str) -> Path:
    return folder() / f"{identity}.trace"


def _is_mine(path: Path) -> bool:
    status = path.stat()
    return status.st_uid == os.getuid() and not status.st_mode & 0o022


def _restored(header: dict[str, Any], data: bytes) -> TracedModel:
    params = []
    for about in header["params"]:
        values = {**about, "shape": tuple(about["shape"])}
        params.append(TracedParam(**values | {k: getattr(torch, values[k]) for k in _DTYPES}))
    graphs, start = [], 0
    for about in header["graphs"]:
        forward, backward = graphs_from_bytes(data[start : start + about["bytes"]])
        graphs.append(TracedGraph(forward=forward, backward=backward, outputs=about["outputs"]))
        start += about["bytes"]
    return TracedModel(params=tuple(params), graphs=tuple(graphs), batch=header["batch"])
