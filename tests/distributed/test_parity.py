"""Sharded and compiled training gives the numbers of plain replicated training; see `parity`.

Not the full product: every value of each axis, and each pair that shares code, in jobs of several trials.
World sizes 1 (no torch.distributed), 2 (1 x 2, 2 x 1), 3 (1 x 3) and 4 (2 x 2).
"""

from __future__ import annotations

import pytest

from tests.distributed.parity import Trial, check_trial, check_trials
from tests.distributed.ranks import run

pytestmark = pytest.mark.distributed


def named(trial: Trial) -> str:
    checkpointed = "-checkpointed" if trial.is_checkpointed else ""
    return f"{trial.case}-{trial.compute}{checkpointed}"


@pytest.mark.parametrize(
    "trial",
    [
        pytest.param(Trial(case="llama"), marks=pytest.mark.slow),
        pytest.param(Trial(case="gpt2", is_checkpointed=True), marks=pytest.mark.slow),
        Trial(case="odd", compute="inductor"),
        pytest.param(
            Trial(case="odd", compute="inductor", is_checkpointed=True), marks=pytest.mark.slow
        ),
        pytest.param(
            Trial(case="broken", compute="inductor", is_checkpointed=True), marks=pytest.mark.slow
        ),
    ],
    ids=named,
)
def test_one_process(trial: Trial) -> None:
    check_trial(None, trial)


@pytest.mark.rare
def test_two_nodes_of_two_with_odd_sizes() -> None:
    trials = [
        Trial(case="odd"),
        Trial(case="odd-lora", is_checkpointed=True),
        Trial(case="broken", is_checkpointed=True),
    ]
    run(check_trials, trials, nodes=2, ranks_per_node=2)


@pytest.mark.parametrize(
    "trial",
    [
        Trial(case="llama-lora"),
        pytest.param(Trial(case="gpt2", is_checkpointed=True), marks=pytest.mark.slow),
    ],
    ids=named,
)
def test_two_nodes_of_two(trial: Trial) -> None:
    run(check_trial, trial, nodes=2, ranks_per_node=2)


@pytest.mark.rare
def test_two_nodes_of_one() -> None:
    trials = [
        Trial(case="llama-lora", is_checkpointed=True),
        Trial(case="broken", compute="inductor"),
        Trial(case="llama", compute="inductor"),
    ]
    run(check_trials, trials, nodes=2, ranks_per_node=1)


@pytest.mark.rare
def test_one_node_of_two() -> None:
    trials = [
        Trial(case="odd", is_checkpointed=True),
        Trial(case="gpt2-lora", compute="inductor", is_checkpointed=True),
    ]
    run(check_trials, trials, nodes=1, ranks_per_node=2)


@pytest.mark.slow
def test_one_node_of_three() -> None:
    trials = [Trial(case="odd", is_checkpointed=True), Trial(case="odd-lora")]
    run(check_trials, trials, nodes=1, ranks_per_node=3)
