"""The examples run as a user starts them, with few steps of small models."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LIMIT_S = 900
TINY = ("--layers=1", "--hidden=64", "--seq-len=32", "--batch-size=2")

pytestmark = [pytest.mark.distributed, pytest.mark.rare]


def run(script: str, *arguments: str | Path, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    """Start a script as one process, or by torchrun."""
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.run(
        [*command, str(EXAMPLES / script), *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def succeed(script: str, *arguments: str | Path, ranks: int = 1) -> str:
    """Run a script, which must succeed; returns its output."""
    done = run(script, *arguments, ranks=ranks)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_full_fine_tuning_saves_exports_and_goes_on(tmp_path: Path) -> None:
    checkpoint, first, second = tmp_path / "checkpoint", tmp_path / "first", tmp_path / "second"
    saving = ["--checkpoint", checkpoint, "--save-every=2"]
    out = succeed(
        "full_finetune.py", "--nodes=2", "--steps=2", *TINY, *saving, "--output", first, ranks=4
    )
    assert "2 nodes, strategy fcdp" in out
    whole = AutoModelForCausalLM.from_pretrained(first)
    assert whole.config.hidden_size == 64

    # One process continues from the checkpoint of four ranks.
    out = succeed("full_finetune.py", "--steps=4", *TINY, *saving, "--output", second)
    assert f"going on after step 2 of {checkpoint}" in out
    trained = AutoModelForCausalLM.from_pretrained(second)
    changed = [
        name
        for name, value in trained.state_dict().items()
        if not value.equal(whole.state_dict()[name])
    ]
    assert "model.embed_tokens.weight" in changed


DIES = """
import os, signal, sys
import full_finetune

save, saves = full_finetune.save, []

def save_or_die(job, folder, step):
    if step == 4 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        saves[-1].wait()
        os.kill(os.getpid(), signal.SIGKILL)
    saves.append(save(job, folder, step))
    return saves[-1]

if "dies" in sys.argv:
    sys.argv.remove("dies")
    full_finetune.save = save_or_die
sys.exit(full_finetune.main())
"""


def test_torchrun_starts_it_again_when_a_rank_dies(tmp_path: Path) -> None:
    """Its last weights equal those of an undisturbed run, to the bit, so its losses did, too."""
    script = tmp_path / "job.py"
    script.write_text(DIES)
    runs = {}
    for name in ("dies", "undisturbed"):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--max-restarts=2", "--nproc-per-node=2", str(script)]
        command += ["--nodes=2", "--steps=6", "--save-every=2", *TINY]
        command += ["--checkpoint", str(tmp_path / name / "checkpoint")]
        command += [
            "--output",
            str(tmp_path / name / "output"),
            *(["dies"] if name == "dies" else []),
        ]
        runs[name] = subprocess.Popen(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    try:
        outputs = {
            name: process.communicate(timeout=LIMIT_S + 100) for name, process in runs.items()
        }
    finally:
        for process in runs.values():
            process.kill()
    assert [process.returncode for process in runs.values()] == [0, 0], outputs
    assert "going on after step 2" in outputs["dies"][0]
    assert "going on" not in outputs["undisturbed"][0]
    expected, found = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name / "output").state_dict()
        for name in ("undisturbed", "dies")
    )
    assert [name for name, value in found.items() if not value.equal(expected[name])] == []


def test_a_run_resumes_elsewhere() -> None:
    out = succeed("resume_elsewhere.py", "--steps=2")
    assert "the resumed losses agree on 4 x 1, 1 x 1" in out
    off = re.search(r"largest difference to the undisturbed run: (\S+) of the loss", out)
    assert off is not None
    assert float(off[1]) < 1e-5


def test_a_rollout_engine_gets_what_has_changed() -> None:
    out = succeed("send_changes.py", "--nodes=2", "--steps=2", ranks=2)
    rows = re.findall(r"^.*step \d: +(\d+) of (\d+) bytes sent, equal bits$", out, re.M)
    (first, total), *later = [(int(sent), int(of)) for sent, of in rows]
    assert first == total
    assert len(later) == 2
    assert all(sent < total / 2 for sent, _ in later)


def _columns(out: str) -> list[list[float]]:
    """Return the rows of the table of bytes: the step, and what each model sent in it."""
    table = out.split("KiB sent from node to node")[1].split("Host memory")[0]
    return [[float(value) for value in row.split()] for row in re.findall(r"^ +\d.*$", table, re.M)]


def test_a_pipeline_sends_as_much_for_more_micro_batches() -> None:
    few, many = (
        succeed(
            "pipeline.py", "--nodes=4", "--steps=2", "--layers=1", f"--micro-batches={n}", ranks=4
        )
        for n in (2, 4)
    )
    sent = [re.findall(r"stage \d: (\S+) KiB of weights, (\S+) KiB", out) for out in (few, many)]
    assert sent[0] == sent[1]
    assert len(sent[0]) == 2
    assert all(float(n) > 100 for row in sent[0] for n in row)


def test_preferences_with_a_reference_that_crosses_once(tmp_path: Path) -> None:
    out = succeed("dpo.py", "--nodes=2", "--steps=2", "--output", tmp_path, ranks=4)
    (_, *first), (_, *second) = _columns(out)
    policy, gradients, reference = first
    assert policy == gradients == reference > 0
    assert second == [policy, gradients, 0]
    AutoModelForCausalLM.from_pretrained(tmp_path)


def test_adapters_need_no_reference(tmp_path: Path) -> None:
    out = succeed("dpo.py", "--steps=1", "--lora", "--output", tmp_path)
    assert "There is one node, so nothing crossed between nodes." in out
    assert (tmp_path / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize("companions", ["fcdp", "zero3"])
def test_rewards_with_three_models_on_one_mesh(companions: str) -> None:
    choice = f"--companion-strategy={companions}"
    out = succeed("grpo.py", "--nodes=2", "--steps=2", choice, ranks=2)
    (_, *first), (_, *second) = _columns(out)
    policy, gradients, reference, reward = first
    assert policy == 2 * gradients, "before there is a copy, once to generate and once to train"
    assert min(reference, reward) > 0
    again = [0, 0] if companions == "fcdp" else [reference, reward]
    assert second == [gradients, gradients, *again]
    held = dict(re.findall(r"^(policy|reference|reward|all) +([\d.]+)$", out, re.M))
    assert float(held.pop("all")) == pytest.approx(sum(map(float, held.values())), abs=0.2)


def test_a_mistake_is_one_line(tmp_path: Path) -> None:
    done = run("full_finetune.py", "--model", tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        f"full_finetune.py: --model {tmp_path} is not a checkpoint: it has no config.json\n"
    )


@pytest.mark.parametrize("more", [[], ["--experts"]], ids=["llama", "experts"])
def test_ranks_that_share_sequences_or_parameters_have_one_loss(more: list[str]) -> None:
    sizes = ["--nodes=2", "--steps=2", "--seq-len=64", *more]
    outs = [succeed("shared_node.py", *sizes, f"--{dim}=2", ranks=4) for dim in ("cp", "tp")]
    losses = [[float(n) for n in re.findall(r"loss (\S+)", out)] for out in outs]
    assert len(losses[0]) == 2
    assert losses[0] == pytest.approx(losses[1], abs=2e-4)
