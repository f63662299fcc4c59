"""The planner against the published results of FCDP's authors, as the tables of docs/validation.md.

    python -m benchmarks.validation

Traces five GPTs of 10 to 31 billion parameters: a quarter of an hour the first time.
Source of all published figures: "FCDP: Fully Cached Data Parallel for Communication-Avoiding Large-Scale
Training" (Park et al.), section VI.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import cache

import torch
from tabulate import tabulate

from fcdp_compile.cluster.profile import CLUSTERS
from fcdp_compile.strategy import Strategy
from fcdp_compile.tools.planner import (
    Estimate,
    Job,
    ModelOptions,
    TracedModel,
    estimate,
    find_source,
    traced_model,
)
from fcdp_compile.tools.simulator import Collectives

OPTIONS = ModelOptions(seq=1792, dtype=torch.float16, attention="eager")
"""The sequence length is not published: with 1792, ZeRO-3 takes the published memory on GPT-15B."""

NODES, RANKS_PER_NODE, BATCH = 2, 8, 8
MODELS = ("gpt-10b", "gpt-15b", "gpt-20b", "gpt-25b", "gpt-30b")

_LARGEST = {
    "zero3": (256, 128, 128, 64, 64),
    "zero++": (128, 128, 64, 32, 0),
    "fcdp": (256, 128, 128, 64, 64),
}
"""Largest global batch on two nodes, with a power of two per GPU, for each of MODELS; 0: no batch fits."""

_SAMPLES_PER_S = {"a40x8-100g-rdma": 14.1, "a40x8-100g-ipoib": 4.1, "a40x8-10gbe": 2.4}
"""Of ZeRO-3 on GPT-10B, by cluster."""

_GB = {"zero3": 34.06, "zero++": 40.92}
"""Peak memory of a GPU on GPT-15B, by strategy."""

_GAIN = 0.413
"""The highest speed-up of FCDP over ZeRO-3 in full fine-tuning."""


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables."""
    argparse.ArgumentParser(description="predicted against published, as Markdown").parse_args(argv)
    print("\n\n".join(_tables()))


def _tables() -> Iterator[str]:
    rows = []
    for strategy, published in _GB.items():
        found = _estimate("gpt-15b", strategy, "a40x8-10gbe")
        rows.append((f"{strategy}, GPT-15B, GB of a GPU", found.peak_gpu_bytes / 1e9, published))
    for cluster, published in _SAMPLES_PER_S.items():
        found = _estimate("gpt-10b", "zero3", cluster)
        rows.append((f"zero3, GPT-10B, {cluster}, samples/s", _samples_per_s(found), published))
    gains = {c: _gain("gpt-10b", c) for c in (*_SAMPLES_PER_S, "a40x8-1gbe")}
    rows.append(("fcdp over zero3, GPT-10B, at most, %", 100 * max(gains.values()), 100 * _GAIN))
    yield tabulate(
        [(name, f"{a:.2f}", f"{b:.2f}", f"{a / b - 1:+.0%}") for name, a, b in rows],
        headers=("", "predicted", "published", "off by"),
        tablefmt="pipe",
        disable_numparse=True,
    )
    yield "Largest global batch (predicted / published):"
    yield tabulate(
        [
            (name, *(_largest(m, name, p) for m, p in zip(MODELS, published, strict=True)))
            for name, published in _LARGEST.items()
        ],
        headers=("", *MODELS),
        tablefmt="pipe",
    )


@cache
def _traced(model: str) -> TracedModel:
    return traced_model(find_source(model, OPTIONS), OPTIONS)


@cache
def _estimate(model: str, strategy: str, cluster: str) -> Estimate:
    job = Job(profile=CLUSTERS[cluster], nodes=NODES, ranks_per_node=RANKS_PER_NODE, batch=BATCH)
    return estimate(_traced(model), Strategy.parse(strategy), job)


def _samples_per_s(found: Estimate) -> float:
    return found.job.samples / found.simulate(Collectives.RING).step_s


def _gain(model: str, cluster: str) -> float:
    fcdp, zero3 = (_samples_per_s(_estimate(model, s, cluster)) for s in ("fcdp", "zero3"))
    return fcdp / zero3 - 1


def _largest(model: str, strategy: str, published: int) -> str:
    most = _estimate(model, strategy, "a40x8-10gbe").max_batch_per_gpu or 0
    power = 1 << (most.bit_length() - 1) if most else 0
    predicted = power * NODES * RANKS_PER_NODE
    mark = "" if predicted == published else " ✗"
    return f"{predicted or 'OOM'} / {published or 'OOM'}{mark}"


if __name__ == "__main__":
    main()
