"""The arguments of `fcdp plan`, `simulate` and `probe`; without torch, so that the command can import it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fcdp_compile.cluster.profile import ClusterProfile

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""Names of dtypes, and torch's names for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Values of "nodes" or "bandwidth" (bytes per second of a node's network card), and the user's texts."""

    of: str
    values: tuple[float, ...]
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedFormat:
    """How a library quantises a weight: bits of a value, and values that share a scale in fp32.

    block: None: a row of the weight.
    """

    bits: int
    block: int | None


PACKED_FORMATS = {
    "nf4": PackedFormat(bits=4, block=64),
    "fp4": PackedFormat(bits=4, block=64),
    "int8": PackedFormat(bits=8, block=None),
}
"""What `--quantise` knows: bitsandbytes' formats without double quantisation."""


LEAST_BYTES = 4 * 2**10
"""The smallest size that is measured; each further size is four times the one before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRequest:
    """The arguments of `fcdp probe`; output: the file for the profile.  nodes: as in `make_mesh`.

    max_bytes: the largest size.  seconds: about how long the probe may take.  name: of the profile; None: a
    name made from ranks and devices.  inter_bytes_per_s: of a node's network card; None: to be measured.
    """

    output: Path | None
    nodes: int | None
    max_bytes: int
    seconds: float
    name: str | None
    inter_bytes_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeOutcome:
    """is_first: whether this rank reports for all ranks.  refusal: why nothing was measured, if so."""

    is_first: bool
    profile: ClusterProfile | None = None
    refusal: str = ""
