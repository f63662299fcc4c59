"""Recordings survive a file, and must belong to the plan that they are shown with."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given

from builders_plan import make_plan, make_recordings, make_run, make_steps, recordings
from documents import damaged
from fcdp_compile.errors import RecordingError
from fcdp_compile.plan import Direction, Kind, Lane, Schedule, Variant
from fcdp_compile.plan.cost import Slot
from fcdp_compile.plan.recording import (
    FORMAT,
    RecordedRun,
    Recording,
    RecordingFile,
    measured,
    read_recordings,
    timelines,
    write_recordings,
)

PLAN = make_plan()
RECORDINGS = make_recordings(PLAN)
COLD = PLAN.schedules[0]


@given(recordings())
def test_round_trip(made: tuple[Recording, ...]) -> None:
    file = RecordingFile(recordings=made)
    text = FORMAT.to_json(file)
    assert FORMAT.from_json(text, source="x.json") == file


def test_a_folder_has_them_by_the_names_of_their_plans(tmp_path: Path) -> None:
    assert read_recordings(tmp_path) == {}
    write_recordings(tmp_path / "graph-000.recorded.json", RECORDINGS)
    write_recordings(tmp_path / "model-1-graph-002.recorded.json", RECORDINGS[:1])
    (tmp_path / "graph-000.plan.json").write_text("of no concern")
    assert read_recordings(tmp_path) == {
        "graph-000": RECORDINGS,
        "model-1-graph-002": RECORDINGS[:1],
    }


def changed(*path: str | int, value: object) -> str:
    """The text of a file with another value at one place."""
    return json.dumps(
        damaged(json.loads(FORMAT.to_json(RecordingFile(recordings=RECORDINGS))), path, value)
    )


FIRST = ("recordings", 0, "runs", 0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (changed("schema", value="fcdp.plan/5"), 'reads "fcdp.recording/1"'),
        (changed(*FIRST, "ends_s", value=[1.0]), "runs[0]: is impossible: 8 starts for 1 ends"),
        (changed(*FIRST, "ends_s", 2, value=0.0015), "step 2 lasts from 0.002 s to 0.0015 s"),
        (changed(*FIRST, "starts_s", 0, value=-1e-9), "step 0 lasts from -1e-09 s to 0.001 s"),
        (changed(*FIRST, "starts_s", 3, value="3"), 'starts_s[3]: is "3", not a number'),
        (changed(*FIRST, "ends_s", 7, value=float("nan")), "ends_s[7]: is nan, which is not"),
        (changed("recordings", 1, "runs", value=[]), "recordings[1]: is impossible: it has no ru"),
        (changed("recordings", 0, "variant", value="hot"), 'variant: is "hot", not one of cold'),
        (changed("recordings", 1, "variant", value="cold"), "forward cold was recorded twice"),
    ],
)
def test_what_is_damaged_is_refused(text: str, says: str) -> None:
    with pytest.raises(RecordingError) as caught:
        FORMAT.from_json(text, source="x.json")
    message = str(caught.value)
    assert message.startswith("x.json: ")
    assert says in message
    assert message.endswith("record again with the options dump and record, or delete the file")


def test_runs_of_one_recording_have_the_same_steps() -> None:
    runs = (make_run(COLD), make_run(PLAN.schedules[1]))
    with pytest.raises(ValueError, match="some runs have 5 steps and others 8"):
        dataclasses.replace(RECORDINGS[0], runs=runs)
    with pytest.raises(ValueError, match="no runs"):
        dataclasses.replace(RECORDINGS[0], runs=())
    with pytest.raises(ValueError, match="lasts from 0 s to inf s"):
        RecordedRun(starts_s=(0,), ends_s=(float("inf"),))
    with pytest.raises(ValueError, match="twice"):
        RecordingFile(recordings=(*RECORDINGS, RECORDINGS[0]))


@pytest.mark.parametrize(
    ("steps_s", "median_s"),
    [((0.5,), 0.5), ((0.3, 0.1, 0.2), 0.2), ((0.4, 0.1, 0.2, 0.3), 0.2), ((0.2, 0.1), 0.1)],
)
def test_what_was_measured_is_the_median_run(steps_s: tuple[float, ...], median_s: float) -> None:
    (recording, *_) = make_recordings(PLAN, steps_s=steps_s)
    time = measured(recording, COLD)
    run = make_run(COLD, step_s=median_s)
    pairs = zip(run.starts_s, run.ends_s, strict=True)
    assert time.slots == tuple(Slot(start_s=a, end_s=b) for a, b in pairs)
    assert time.total_s == run.ends_s[-1]


def test_a_lane_is_busy_where_any_step_is_on_it_and_compute_where_it_computes() -> None:
    """Two gathers under way at once, then one later; a wait of 4 s between computes of 1 and 2 s."""
    gathers = [(Kind.INTER_ALL_GATHER, 0, 1)] * 3
    entries = [*gathers, (Kind.COMPUTE, None, 0), (Kind.WAIT, 0, 0), (Kind.COMPUTE, None, 0)]
    schedule = Schedule(
        direction=Direction.FORWARD, variant=Variant.COLD, steps=make_steps(entries)
    )
    run = RecordedRun(
        starts_s=(0.0, 1.0, 6.0, 0.0, 1.0, 5.0), ends_s=(2.0, 3.0, 6.5, 1.0, 5.0, 7.0)
    )
    time = measured(dataclasses.replace(RECORDINGS[0], runs=(run,)), schedule)
    busy = {lane: s for lane, s in time.busy_s.items() if s}
    assert busy == {Lane.INTER: 3.5, Lane.COMPUTE: 3.0}
    assert (time.total_s, time.exposed_s) == (7.0, 4.0)


def test_timelines_of_all_schedules() -> None:
    times = timelines(PLAN, RECORDINGS)
    assert list(times) == [(s.direction, s.variant) for s in PLAN.schedules]
    assert [t.total_s for t in times.values()] == [
        pytest.approx(0.001 * len(s.steps)) for s in PLAN.schedules
    ]
    assert timelines(PLAN, ()) == {}


def test_those_of_another_plan_are_refused() -> None:
    with pytest.raises(
        RecordingError, match=r"with the plan .* of graph 0, not with .* record aga"
    ):
        timelines(make_plan(layers=2), RECORDINGS)
    with pytest.raises(RecordingError, match=r"of graph 0, not with .* of graph 3; record again"):
        timelines(make_plan(graph=3), RECORDINGS)
    odd = dataclasses.replace(RECORDINGS[0], variant=Variant.COLLECT)
    with pytest.raises(RecordingError, match="forward collect was recorded, but the plan has no"):
        timelines(PLAN, (odd,))


def test_another_number_of_steps_is_refused_which_a_digest_does_not_see() -> None:
    """A plan's digest does not cover compute steps."""
    (kind, *rest) = ((s.kind, s.bucket, s.bytes) for s in COLD.steps)
    steps = make_steps([kind, (Kind.COMPUTE, None, 0), *rest])
    changed = dataclasses.replace(COLD, steps=steps)
    plan = dataclasses.replace(PLAN, schedules=(changed, *PLAN.schedules[1:]))
    assert plan.digest() == PLAN.digest()
    with pytest.raises(RecordingError, match="forward cold was recorded with 8 steps and the plan"):
        timelines(plan, RECORDINGS)
