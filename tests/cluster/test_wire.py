"""The bytes that really cross between the nodes of a simulated cluster, read from the nodes' cards."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import formulas
from tests.cluster.simulated import needs_nodes, run_on_nodes
from tests.cluster.wire_worker import STRATEGIES

pytestmark = needs_nodes

_NODES, _RANKS_PER_NODE = 2, 2
_SLACK = 64 * 2**10
"""Extra bytes allowed for barriers and agreements, per step and node."""


@dataclass(frozen=True, kw_only=True)
class Wire:
    """Sizes of the model, and bytes that one node sent in each training step and evaluation batch."""

    all_bytes: int
    trainable_bytes: int
    steps: list[int]
    evaluation: list[int]


@pytest.fixture(scope="module")
def wire(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Wire]]:
    """Returns a function that trains in a mode (each mode once) and returns the bytes that each node sent."""
    found: dict[str, list[Wire]] = {}

    def measure(mode: str) -> list[Wire]:
        if mode not in found:
            found[mode] = _run(mode, tmp_path_factory.mktemp("wire"))
        return found[mode]

    return measure


def _run(mode: str, folder: Path) -> list[Wire]:
    return [Wire(**found) for found in _reports(mode, folder)]


def _reports(
    mode: str, folder: Path, ranks_per_node: int = _RANKS_PER_NODE
) -> list[dict[str, Any]]:
    worker = Path(__file__).with_name("wire_worker.py")
    job = ["--nodes", _NODES, "--ranks-per-node", ranks_per_node, "--timeout", 600]
    done = run_on_nodes([*job, "--", worker, folder, mode])
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / f"{mode}-{node}.json").read_text()) for node in range(_NODES)]


def _report(what: str, sent: int, limit: float) -> None:
    print(f"{what}: {sent} bytes sent by the node, at most {int(limit)} allowed")  # noqa: T201


@pytest.mark.rare
def test_every_strategy_sends_what_the_formula_says(tmp_path: Path) -> None:
    """In every step of full fine-tuning after the first, with 2 % for headers.

    With home nodes as without: the matrices' bytes are spread evenly here.
    """
    for node, found in enumerate(_reports("strategies", tmp_path)):
        shapes = {n: tuple(s) for n, s in found["shapes"].items()}
        model = formulas.Model(
            shapes=shapes,
            trainable=frozenset(shapes),
            # The first layer's input needs no gradient, and the backward does not read biases.
            backward=frozenset(n for n in shapes if "weight" in n and n != "layers.0.weight"),
            buckets=[(n,) for n in shapes],
        )
        for name, micro_batches in STRATEGIES:
            moved = formulas.training_step(
                model,
                name.removesuffix("+matrix").removesuffix("+offload"),
                _NODES,
                _RANKS_PER_NODE,
                first=False,
                micro_batches=micro_batches,
            )
            inter = [sent for kind, sent in moved.bytes.items() if kind.startswith("inter")]
            expected = _RANKS_PER_NODE * sum(inter)
            for sent in found["steps"][name]:
                _report(f"{name}, node {node}, of {expected}", sent, 1.02 * expected + _SLACK)
                assert expected <= sent <= 1.02 * expected + _SLACK


@pytest.mark.rare
@pytest.mark.parametrize("ranks_per_node", [2, 4])
def test_ranks_that_share_send_their_parts_only(ranks_per_node: int, tmp_path: Path) -> None:
    """Sequences, parameters or both shared within a node: what the model itself sends stays there."""
    for node, found in enumerate(_reports("inner", tmp_path, ranks_per_node)):
        assert found["runs"]
        for run in found["runs"]:
            shapes = {n: tuple(s) for n, s in run["shapes"].items()}
            model = formulas.Model(
                shapes=shapes,
                trainable=frozenset(shapes),
                backward=frozenset(),  # all is cached
                buckets=[(n,) for n in shapes],
            )
            places = ranks_per_node // run["tp"]
            moved = formulas.training_step(model, "fcdp", _NODES, places, first=False)
            of_rank = sum(sent for kind, sent in moved.bytes.items() if kind.startswith("inter"))
            expected, limit = ranks_per_node * of_rank, 1.02 * ranks_per_node * of_rank + _SLACK
            within = ranks_per_node * run["within"]
            assert within > limit - expected, "the control: it would show if it left the node"
            for sent in run["steps"]:
                about = (
                    f"cp={run['cp']}, tp={run['tp']}, node {node}, of {expected}, {within} within"
                )
                _report(about, sent, limit)
                assert expected <= sent <= limit


@pytest.mark.rare
def test_full_fine_tuning_gathers_and_reduces_once(wire: Callable[[str], list[Wire]]) -> None:
    for node, found in enumerate(wire("full")):
        assert found.trainable_bytes == found.all_bytes
        limit = 1.02 * 2 * found.all_bytes * (_NODES - 1) / _NODES + _SLACK
        for number, sent in enumerate(found.steps):
            _report(f"full, node {node}, step {number} (W = {found.all_bytes})", sent, limit)
            assert sent <= limit
            assert sent >= limit / 2, "the control: what must cross has crossed"


@pytest.mark.slow
def test_lora_sends_adapters_only(wire: Callable[[str], list[Wire]]) -> None:
    for node, found in enumerate(wire("lora")):
        trained = found.trainable_bytes
        limit = 1.05 * 2 * trained * (_NODES - 1) / _NODES + _SLACK
        for number, sent in enumerate(found.steps):
            _report(f"lora, node {node}, step {number} (W_trainable = {trained})", sent, limit)
        frozen = (found.all_bytes - trained) * (_NODES - 1) / _NODES
        assert found.steps[0] >= frozen, "the control: the first step gathers the frozen weights"
        assert all(sent <= limit for sent in found.steps[1:])


@pytest.mark.slow
@pytest.mark.parametrize("mode", [pytest.param("full", marks=pytest.mark.rare), "lora"])
def test_evaluation_sends_nothing_after_its_first_batch(
    wire: Callable[[str], list[Wire]], mode: str
) -> None:
    for node, found in enumerate(wire(mode)):
        for number, sent in enumerate(found.evaluation):
            _report(f"{mode}, node {node}, evaluation batch {number}", sent, _SLACK)
        assert found.evaluation[0] > found.evaluation[1], (
            "the control: the last step made them stale"
        )
        assert all(sent <= _SLACK for sent in found.evaluation[1:])
