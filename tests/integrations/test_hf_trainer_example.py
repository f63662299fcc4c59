"""The example hf_trainer.py trains, saves a model that from_pretrained reads, and resumes checkpoints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

pytestmark = [pytest.mark.distributed, pytest.mark.rare]

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "hf_trainer.py"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def test_it_trains_saves_and_goes_on(tmp_path: Path) -> None:
    first = _example(*TORCHRUN, "--nodes", "2", "--steps", "2", "--output", str(tmp_path))
    assert first.count("inter_node_mib_per_step") == 2
    assert first.count("eval_loss") == 2
    LlamaForCausalLM.from_pretrained(tmp_path)
    # One process resumes the checkpoint of two, and takes the step that is left.
    again = _example(sys.executable, "--steps", "3", "--output", str(tmp_path), "--resume")
    assert again.count("'loss'") == 1


def _example(*command: str) -> str:
    split = len(TORCHRUN) if command[: len(TORCHRUN)] == TORCHRUN else 1
    done = subprocess.run(
        [*command[:split], str(EXAMPLE), *command[split:]],
        capture_output=True, text=True, timeout=900, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
