"""A plan as a trace: every step on its lane at its simulated time, with anchored arrows."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from builders_plan import make_plan, make_recordings, make_steps, with_inner
from fcdp_compile.cli import main
from fcdp_compile.cluster.profile import CLUSTERS, write_profile
from fcdp_compile.plan import Direction, Kind, Lane, Schedule, Variant
from fcdp_compile.plan.cost import MACHINES
from fcdp_compile.plan.json import write_plan
from fcdp_compile.plan.recording import RecordedRun, timelines, write_recordings
from fcdp_compile.tools.simulator import simulate
from fcdp_compile.tools.view.chrome_trace import Event, chrome_trace

PLAN = make_plan()
MACHINE = MACHINES["cpu"]


def events(kind: str) -> list[Event]:
    return [e for e in chrome_trace(PLAN, MACHINE) if e["ph"] == kind]


def test_every_transfer_is_a_slice_on_its_lane() -> None:
    names = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in events("M") if e["name"] == "thread_name"
    }
    assert set(names.values()) == {lane.value for lane in Lane}
    for process, schedule in enumerate(PLAN.schedules):
        time = simulate(schedule, MACHINE, PLAN.ranks_per_node)
        mine = {e["args"]["step"]: e for e in events("X") if e["pid"] == process}
        moving = [s for s in schedule.steps if s.lane is not Lane.COMPUTE]
        assert {s.index for s in moving} <= mine.keys()
        for index, event in mine.items():
            step, slot = schedule.steps[index], time.slots[index]
            assert names[process, event["tid"]] == step.lane.value
            assert event["ts"] == pytest.approx(1e6 * slot.start_s)
            assert event["dur"] == pytest.approx(1e6 * (slot.end_s - slot.start_s))
            assert event["cat"] == step.kind.value


def recorded(*spans: tuple[float, float]) -> RecordedRun:
    return RecordedRun(starts_s=tuple(a for a, _ in spans), ends_s=tuple(b for _, b in spans))


def test_what_was_measured_has_a_process_behind_the_predicted_one() -> None:
    (_, warm, _) = make_recordings(PLAN)
    schedule = PLAN.schedules[1]
    found = chrome_trace(PLAN, MACHINE, measured=timelines(PLAN, [warm]), first_process=5)
    titles = {e["pid"]: e["args"]["name"] for e in found if e["name"] == "process_name"}
    assert titles == {
        5: "graph 0, forward cold",
        6: "graph 0, forward warm",
        7: "graph 0, forward warm, measured",
        8: "graph 0, backward warm",
    }
    slices = [e for e in found if e["ph"] == "X" and e["pid"] == 7]
    assert [e["args"]["step"] for e in slices] == [s.index for s in schedule.steps]
    for event in slices:
        assert event["ts"] == pytest.approx(1e3 * event["args"]["step"])
        assert event["dur"] == pytest.approx(1e3)


def test_steps_that_a_lane_has_at_once_are_on_tracks_of_their_own() -> None:
    """Slices of one track must not overlap, or viewers drop them."""
    gathers = make_steps([(Kind.INTER_ALL_GATHER, 1, 8)] * 4)
    schedule = Schedule(direction=Direction.FORWARD, variant=Variant.COLD, steps=gathers)
    plan = dataclasses.replace(PLAN, schedules=(schedule,))
    (recording,) = make_recordings(plan)
    run = recorded((0, 2), (1, 4), (2, 3), (3.5, 5))
    times = timelines(plan, [dataclasses.replace(recording, runs=(run,))])
    found = [e for e in chrome_trace(plan, MACHINE, measured=times) if e["pid"] == 1]
    names = {e["tid"]: e["args"]["name"] for e in found if e["name"] == "thread_name"}
    on = [names[e["tid"]] for e in found if e["ph"] == "X"]
    assert on == ["inter", "inter 2", "inter", "inter"]
    assert set(names.values()) == {*(lane.value for lane in Lane), "inter 2"}
    order = {e["tid"]: e["args"]["sort_index"] for e in found if e["name"] == "thread_sort_index"}
    in_order = [names[track] for track in sorted(order, key=order.__getitem__)]
    assert in_order == ["compute", "inter", "inter 2", "intra", "h2d", "d2h"]


def test_what_the_model_sends_has_a_track_of_its_own() -> None:
    plan = with_inner(PLAN)
    found = [e for e in chrome_trace(plan, MACHINE) if e["pid"] == 0]
    names = {e["tid"]: e["args"]["name"] for e in found if e["name"] == "thread_name"}
    order = {e["tid"]: e["args"]["sort_index"] for e in found if e["name"] == "thread_sort_index"}
    in_order = [names[track] for track in sorted(order, key=order.__getitem__)]
    assert in_order == ["compute", "inter", "intra", "intra (model)", "h2d", "d2h"]
    time = simulate(plan.schedules[0], MACHINE, plan.ranks_per_node)
    (slice_,) = (e for e in found if e["ph"] == "X" and names[e["tid"]] == "intra (model)")
    ((index, slot),) = time.inner.items()
    assert slice_["args"] == {"step": index, "bytes": 4 * 2**20}
    assert slice_["ts"] == pytest.approx(1e6 * slot.start_s)
    assert slice_["dur"] == pytest.approx(1e6 * (slot.end_s - slot.start_s))


def test_hovering_shows_bytes_and_parameters() -> None:
    (gather,) = (e for e in events("X") if e["name"] == "inter_all_gather 1")
    adapters = PLAN.buckets[1]
    assert gather["args"]["bytes"] == adapters.slot_bytes
    assert gather["args"]["parameters"] == [p.name for p in adapters.params]
    assert gather["args"]["why"] == f"{adapters.why}; {PLAN.placements[1].why}"


def test_arrows_join_slices_of_different_lanes() -> None:
    slices = events("X")

    def inside(event: Event) -> list[Event]:
        return [
            s
            for s in slices
            if (s["pid"], s["tid"]) == (event["pid"], event["tid"])
            and s["ts"] <= event["ts"] <= s["ts"] + s["dur"]
        ]

    leaves = {e["id"]: e for e in events("s")}
    arrives = {e["id"]: e for e in events("f")}
    assert leaves.keys() == arrives.keys() != set()
    for number, event in leaves.items():
        assert inside(event), event
        assert arrives[number]["tid"] != event["tid"]
        assert arrives[number]["ts"] >= event["ts"] - 1e-3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i in range(2):
        write_plan(tmp_path / f"graph-{i:03d}.plan.json", make_plan(graph=i))
    return tmp_path


def test_the_command_writes_one_trace_of_all_graphs(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dump", str(folder), "--format", "chrome", "--machine", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out)["traceEvents"]
    titles = [e["args"]["name"] for e in found if e["name"] == "process_name"]
    schedules = ["forward cold", "forward warm", "backward warm"]
    assert titles == [f"graph {i}, {s}" for i in range(2) for s in schedules]
    assert [e["pid"] for e in found if e["name"] == "process_name"] == list(range(6))
    gathers = [e for e in found if e["cat" if "cat" in e else "ph"] == Kind.LOAD.value]
    assert len(gathers) == 2 * 3


def test_the_command_shows_what_was_recorded(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_recordings(folder / "graph-001.recorded.json", make_recordings(make_plan(graph=1))[2:])
    assert main(["dump", str(folder), "--format", "chrome"]) == 0
    found = json.loads(capsys.readouterr().out)["traceEvents"]
    titles = [e["args"]["name"] for e in found if e["name"] == "process_name"]
    assert titles[-2:] == ["graph 1, backward warm", "graph 1, backward warm, measured"]
    assert len(titles) == 7


def test_the_command_takes_the_machine_of_a_cluster(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = CLUSTERS["a40x8-1gbe"]
    path = folder / "my.json"
    write_profile(path, dataclasses.replace(profile, name="mine"))
    traces = []
    for name in (profile.name, str(path), "cuda"):
        assert main(["dump", str(folder), "--format", "chrome", "--machine", name]) == 0
        traces.append(capsys.readouterr().out)
    assert traces[0] == traces[1] != traces[2]


def test_a_machine_that_there_is_not(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["dump", str(folder), "--format", "chrome", "--machine"]
    for name, says in (
        ("a40x8-2gbe", "unknown cluster 'a40x8-2gbe'; give a file .* did you mean 'a40x8-1gbe'"),
        ("cpuu", "unknown cluster 'cpuu'; .*; cuda, cpu are machines too"),
        ("missing.json", "missing.json: No such file"),
        (str(folder / "graph-000.plan.json"), 'schema: is "fcdp.plan/.*reads "fcdp.cluster/1"'),
    ):
        assert main([*arguments, name]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert re.search(says, line), line
