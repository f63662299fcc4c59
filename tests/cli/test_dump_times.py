"""`fcdp dump`: predicted and measured times beside the steps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from builders_plan import make_plan, make_recordings, with_inner
from commands import cells, refusal
from fcdp_compile.cli import main
from fcdp_compile.cluster.profile import CLUSTERS
from fcdp_compile.plan import Lane
from fcdp_compile.plan.cost import MACHINES, Slot, Timeline
from fcdp_compile.plan.json import from_json, write_plan
from fcdp_compile.plan.recording import measured, write_recordings
from fcdp_compile.tools.simulator import simulate


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A dump of one graph."""
    write_plan(tmp_path / "graph-000.plan.json", make_plan())
    return tmp_path


def timed(text: str, title: str) -> list[list[str]]:
    """The cells of the rows of a schedule's table of steps."""
    lines = text[text.index(f"\n{title}\n") :].splitlines()
    header = next(i for i, line in enumerate(lines) if line.split()[:1] == ["step"])
    end = next(i for i, line in enumerate(lines) if line.split()[:1] == ["total"])
    return [line.split() for line in lines[header + 2 : end]]


def shown(slot: Slot) -> list[str]:
    return [f"{1e3 * slot.start_s:.3f}", f"+{1e3 * (slot.end_s - slot.start_s):.3f}"]


def totals(time: Timeline) -> list[str]:
    times_s = [time.total_s, time.exposed_s, *(time.busy_s[lane] for lane in Lane)]
    return [f"{1e3 * s:.3f}" for s in times_s]


def test_predicted_times_stand_beside_the_steps(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = make_plan()
    for name, machine in (
        ("cpu", MACHINES["cpu"]),
        *((c.name, c.machine) for c in CLUSTERS.values()),
    ):
        assert main(["dump", str(folder), "--machine", name]) == 0
        out = capsys.readouterr().out
        assert f"\npredicted with the speeds of {name}\n" in out
        assert "measured" not in out
        for schedule, title in zip(
            plan.schedules, ("forward cold", "forward warm", "backward"), strict=True
        ):
            time = simulate(schedule, machine, plan.ranks_per_node)
            rows = timed(out, title)
            for row, step in zip(rows, schedule.steps, strict=True):
                expected = [
                    *map(str, step.waits),
                    *shown(time.slots[step.index]),
                    *step.label.split(),
                ]
                assert row[-len(expected) :] == expected
            part = out[out.index(f"\n{title}\n") :]
            assert cells(part, "predicted")[1:] == totals(time)


def test_what_the_model_sends_has_bytes_and_times(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = with_inner(make_plan())
    write_plan(folder / "graph-000.plan.json", plan)
    write_recordings(folder / "graph-000.recorded.json", make_recordings(plan)[:1])
    assert main(["dump", str(folder)]) == 0
    out = capsys.readouterr().out
    forward = out[out.index("\nforward cold\n") : out.index("\nforward warm\n")]
    assert re.search(r"intra \(model\) +in 1 +4194304 +4\.000\n", forward)
    time = simulate(plan.schedules[0], MACHINES["cuda"], plan.ranks_per_node)
    assert cells(forward, "predicted")[1:] == [*totals(time), f"{1e3 * time.inner_s:.3f}"]
    assert len(cells(forward, "measured")[1:]) == len(totals(time)), "nobody records parts of steps"


def test_measured_times_stand_beside_predicted_ones(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = make_plan()
    recordings = make_recordings(plan, steps_s=(0.003, 0.001, 0.002))[1:]
    write_recordings(folder / "graph-000.recorded.json", recordings)
    assert main(["dump", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "measured: the median of the recorded runs of each schedule" in out
    assert "+2.000" not in out[: out.index("\nforward warm\n")], "it was not recorded"
    for recording, title in zip(recordings, ("forward warm", "backward"), strict=True):
        schedule = next(s for s in plan.schedules if (s.direction, s.variant) == recording.key)
        predicted = simulate(schedule, MACHINES["cuda"], plan.ranks_per_node)
        for i, row in enumerate(timed(out, title)):
            measured_ms = [f"{2.0 * i:.3f}", "+2.000"]
            assert row[-4:] == [*shown(predicted.slots[i]), *measured_ms]
        part = out[out.index(f"\n{title}\n") :]
        assert cells(part, "predicted")[1:] == totals(predicted)
        assert cells(part, "measured")[1:] == totals(measured(recording, schedule))


def test_the_plan_as_json_has_no_times(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded = folder / "graph-000.recorded.json"
    recorded.write_text("damaged")
    assert main(["dump", str(folder), "--format", "json"]) == 0
    assert from_json(capsys.readouterr().out, source="stdout") == make_plan()


def test_a_choice_of_schedules_is_no_other_plan(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_recordings(folder / "graph-000.recorded.json", make_recordings(make_plan()))
    assert main(["dump", str(folder), "--variant", "cold"]) == 0
    assert "+1.000" in capsys.readouterr().out


@pytest.mark.parametrize("table_format", ["table", "chrome"])
def test_recordings_of_no_use_are_refused(
    folder: Path, table_format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "graph-000.recorded.json"
    arguments = ("dump", str(folder), "--format", table_format)
    write_recordings(path, make_recordings(make_plan(layers=3)))
    line = refusal(capsys, *arguments)
    assert line.startswith(f"fcdp: {path}: forward cold was recorded with the plan ")
    assert line.endswith("record again with the options dump and record, or delete the file\n")
    path.write_text("{}")
    assert "schema: is missing, so this is not a recording" in refusal(capsys, *arguments)
