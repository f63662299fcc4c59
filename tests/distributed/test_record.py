"""The option `record`: times of some runs of each graph, which fit its plan; it changes no numbers."""

from __future__ import annotations

import hashlib
import json
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import fcdp_compile
from fcdp_compile.cli import main
from fcdp_compile.plan import Direction, Variant
from fcdp_compile.plan.json import read_plan
from fcdp_compile.plan.recording import ScheduleKey, read_recordings, timelines
from tests.distributed.beside import Beside, whole
from tests.distributed.models import CASES
from tests.distributed.ranks import run
from tests.recorded import assert_causal, assert_in_turn

pytestmark = [pytest.mark.distributed, pytest.mark.rare]

STRATEGIES = ("fcdp", "zero3", "fcdp+w8+g4")
RUNS = 2
STEPS = 1 + RUNS + 3
OPTIONS: dict[str, Any] = {"bucket_mb": 0.05}
COLD, WARM = (Direction.FORWARD, Variant.COLD), (Direction.FORWARD, Variant.WARM)
BACKWARD, ACCUMULATE, COLLECT = (
    (Direction.BACKWARD, variant) for variant in (Variant.COLD, Variant.ACCUMULATE, Variant.COLLECT)
)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A trained model's bits, and the file of times after each step."""

    losses: list[float]
    parameters: list[str]
    files: list[int | None]


def _train(mesh: DeviceMesh, strategy: str, folder: Path | None) -> Trained:
    options = OPTIONS if folder is None else OPTIONS | {"dump": folder, "record": RUNS}
    case = CASES[
        "llama" if strategy == "fcdp" else "odd"
    ]  # one of several buckets, which takes longer
    pair = Beside(mesh, case, strategy=strategy, options=options)
    losses, files = [], []
    for step in range(STEPS):
        loss = pair.case.loss(pair.net, pair.data(step))
        losses.append(loss.item())
        loss.backward()
        pair.optimize()
        found = [] if folder is None else list(folder.glob("*.recorded.json"))
        files.append(found[0].stat().st_mtime_ns if found else None)
    parameters = [
        hashlib.sha256(whole(p).numpy().tobytes()).hexdigest() for p in pair.model.parameters()
    ]
    return Trained(losses=losses, parameters=parameters, files=files)


def _accumulate(mesh: DeviceMesh, folder: Path) -> None:
    """Train some steps without `no_sync`, then some steps of three micro-batches."""
    pair = Beside(mesh, CASES["odd"], options={"dump": folder, "record": 1})
    for batches in (1, 1, 1, 3, 3, 3):
        for i in range(batches):
            last = i == batches - 1
            with nullcontext() if last else fcdp_compile.no_sync(pair.net):
                pair.case.loss(pair.net, pair.data(i)).backward()
        pair.optimize()


def _infer(mesh: DeviceMesh, folder: Path) -> None:
    pair = Beside(mesh, CASES["odd"], options={"dump": folder, "record": RUNS})
    with torch.no_grad():
        for _ in range(STEPS):
            pair.case.loss(pair.net, pair.data(0))


def _all(mesh: DeviceMesh, folder: Path) -> dict[str, tuple[Trained, Trained]]:
    _accumulate(mesh, folder / "accumulate")
    _infer(mesh, folder / "infer")
    return {
        strategy: (_train(mesh, strategy, None), _train(mesh, strategy, folder / strategy))
        for strategy in STRATEGIES
    }


@dataclass(frozen=True, kw_only=True)
class Done:
    """The folder of the recordings, and what each rank trained, without and with recording."""

    folder: Path
    ranks: list[dict[str, tuple[Trained, Trained]]]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    folder = tmp_path_factory.mktemp("recorded")
    return Done(folder=folder, ranks=run(_all, folder, nodes=2, ranks_per_node=2))


def counts_of(folder: Path) -> dict[ScheduleKey, int]:
    """The number of recorded runs of each schedule of the only plan; all recordings must fit the plan."""
    (found,) = folder.glob("*.recorded.json")
    stem = found.name.removesuffix(".recorded.json")
    plan = read_plan(folder / f"{stem}.plan.json")
    recordings = read_recordings(folder)[stem]
    assert list(timelines(plan, recordings)) == [r.key for r in recordings]
    steps = {(s.direction, s.variant): s.steps for s in plan.schedules}
    for recording in recordings:
        for times in recording.runs:
            assert len(times.starts_s) == len(steps[recording.key])
            assert_causal(times, steps[recording.key])
            assert_in_turn(times, steps[recording.key])
    return {r.key: len(r.runs) for r in recordings}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_times_follow_the_plan(done: Done, strategy: str) -> None:
    assert counts_of(done.folder / strategy) == {COLD: RUNS, BACKWARD: RUNS}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_results_are_those_without_a_recording_bit_by_bit(done: Done, strategy: str) -> None:
    for plain, timed in (rank[strategy] for rank in done.ranks):
        assert (timed.losses, timed.parameters) == (plain.losses, plain.parameters)
        assert len(set(timed.losses)) == STEPS, "the control: it trained"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nothing_is_written_before_all_is_recorded_nor_after(done: Done, strategy: str) -> None:
    """The last run's times may be read and written only when the next run begins."""
    for plain, timed in (rank[strategy] for rank in done.ranks[:1]):
        assert plain.files == [None] * STEPS
        assert timed.files[:RUNS] == [None] * RUNS
        assert None not in timed.files[RUNS + 1 :]
        assert len(set(timed.files[RUNS + 1 :])) == 1


def test_variants_that_are_added_later_are_recorded_and_the_others_stay(done: Done) -> None:
    """The plan's file is then written again, with another digest."""
    counts = counts_of(done.folder / "accumulate")
    assert counts == dict.fromkeys([COLD, BACKWARD, WARM, ACCUMULATE, COLLECT], 1)


def test_inference(done: Done) -> None:
    """After the first batch everything is cached."""
    assert counts_of(done.folder / "infer") == {(Direction.INFERENCE, Variant.WARM): RUNS}


def test_the_command_shows_it(done: Done, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(done.folder / "fcdp")
    assert main(["dump", folder, "--machine", "cpu"]) == 0
    table = capsys.readouterr().out
    assert table.count("measured ms") == 2
    assert len([line for line in table.splitlines() if line.startswith("measured ")]) == 2
    assert main(["dump", folder, "--format", "chrome", "--machine", "cpu"]) == 0
    events = json.loads(capsys.readouterr().out)["traceEvents"]
    titles = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    mine = [pid for pid, title in titles.items() if title.endswith(", measured")]
    assert sorted(titles[pid] for pid in mine) == [
        "graph 0, backward cold, measured",
        "graph 0, forward cold, measured",
    ]
    for pid in mine:
        slices = [e for e in events if e["ph"] == "X" and e["pid"] == pid]
        assert {e["cat"] for e in slices} >= {"compute", "wait", "intra_all_gather"}
