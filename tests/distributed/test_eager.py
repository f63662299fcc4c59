"""A model that is not compiled gives the same numbers; slowly."""

from __future__ import annotations

import pytest

from tests.distributed.parity import Trial, check_trial, check_trials
from tests.distributed.ranks import run

pytestmark = pytest.mark.distributed


def test_one_process() -> None:
    check_trial(None, Trial(case="odd", compute=None))


@pytest.mark.rare
def test_two_nodes_of_two() -> None:
    trials = [
        Trial(case="odd", compute=None, is_checkpointed=True),
        Trial(case="broken", compute=None),
    ]
    run(check_trials, trials, nodes=2, ranks_per_node=2)


@pytest.mark.slow
def test_two_nodes_of_one() -> None:
    trials = [
        Trial(case="llama-lora", compute=None),
        Trial(case="gpt2", compute=None, is_checkpointed=True),
    ]
    run(check_trials, trials, nodes=2, ranks_per_node=1)
