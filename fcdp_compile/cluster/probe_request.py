"""What `fcdp probe` is asked for and what becomes of it; without torch, for the command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fcdp_compile.cluster.profile import ClusterProfile

LEAST_BYTES = 4 * 2**10
"""The smallest size that is measured; the next is four times that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRequest:
    """output: the file for the profile, or none.  nodes: as of `make_mesh`.  max_bytes: the largest size.

    seconds: about how long it may take.  name: of the profile; None for one of its ranks and devices.
    inter_bytes_per_s: of a node's card, in place of measuring it.
    """

    output: Path | None
    nodes: int | None
    max_bytes: int
    seconds: float
    name: str | None
    inter_bytes_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeOutcome:
    """is_first: whether this is the rank that speaks for all.  refusal: why nothing was measured, if so."""

    is_first: bool
    profile: ClusterProfile | None = None
    refusal: str = ""
