"""`fcdp probe`: measure this cluster, say whether its host is faster than its network, write a profile.

Measuring needs torch and process groups, and no other command should wait for them: so `run` imports that
module by its name (`LATE` in tests/imports.py).
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from pathlib import Path

from fcdp_compile.cli.command import Answer, Declared, kind
from fcdp_compile.cli.tables.probe import format_profile
from fcdp_compile.cluster.profile import profile_to_json
from fcdp_compile.cluster.quantities import parse_bytes, parse_bytes_per_s
from fcdp_compile.cluster.requests import LEAST_BYTES, ProbeOutcome, ProbeRequest
from fcdp_compile.errors import ArgumentError, FcdpError

SUMMARY = "measure this cluster: is the host faster than your network?"
DESCRIPTION = (
    "Measure collectives between and within nodes, copies to and from the host and compute; start it on "
    "every node with torchrun, as a training job: torchrun ... -m fcdp_compile.cli probe --output "
    "cluster.json. Rank 0 prints a table and writes a cluster profile, for the option machine of the "
    "backend and for planning."
)

_MOST_SECONDS = 3600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `fcdp probe`."""
    add = Declared(parser)
    add.value("--output", _file, "FILE", "where to write the profile (JSON)")
    nodes = "split the ranks into this many nodes (default: the nodes that torchrun uses)"
    add.value("--nodes", _count, "N", nodes)
    add.value(
        "--inter",
        kind(parse_bytes_per_s),
        "BANDWIDTH",
        "take this bandwidth for a node's network card, 10G (bits) or 1.25GB/s, and do not measure "
        "it: for a cluster that does not exist yet",
    )
    size = "the largest size to measure, if memory and time allow"
    add.value("--max-size", _size, "SIZE", size, default="256MiB")
    add.value("--seconds", _seconds, "S", "about how long to measure", default="30")
    add.value("--name", _name, None, "name of the profile (default: ranks and device)")
    add.form(json="the profile")


def run(options: argparse.Namespace) -> Answer:
    """Measure; the first rank returns the answer, the others an empty text.

    Raises: FcdpError on the first rank if nothing can be measured, OSError if the profile cannot be written.
    """
    request = ProbeRequest(
        output=options.output,
        nodes=options.nodes,
        max_bytes=options.max_size,
        seconds=options.seconds,
        name=options.name,
        inter_bytes_per_s=options.inter,
    )
    probe: Callable[[ProbeRequest], ProbeOutcome]
    probe = importlib.import_module("fcdp_compile.tools.probe.measure").probe
    outcome = probe(request)
    if outcome.refusal and outcome.is_first:
        raise FcdpError(outcome.refusal)
    if outcome.profile is None or not outcome.is_first:
        return Answer("", 2 if outcome.refusal else 0)
    if options.format == "json":
        return Answer(profile_to_json(outcome.profile).rstrip("\n"))
    written = f"\n\nThe profile is in {options.output}." if options.output else ""
    return Answer(format_profile(outcome.profile) + written)


@kind
def _file(text: str) -> Path:
    if not text:
        raise ArgumentError("is empty; give the name of a file")
    return Path(text)


@kind
def _count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 2**20:
        raise ArgumentError(f"must be a number of nodes from 1, not {text!r}")
    return int(text)


@kind
def _size(text: str) -> int:
    size = parse_bytes(text)
    if not 4 * LEAST_BYTES <= size < 2**40:
        raise ArgumentError(f"must be from 16KiB to less than 1TiB, not {text!r}")
    return size


@kind
def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds <= _MOST_SECONDS:
        raise ArgumentError(f"must be above 0 and at most {_MOST_SECONDS:.0f}, not {text!r}")
    return seconds


@kind
def _name(text: str) -> str:
    if not text or not text.isprintable():
        raise ArgumentError(f"must be a printable name, not {text!r}")
    return text
