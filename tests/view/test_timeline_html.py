"""The page of a plan as text: its content, its escaping, and that it loads nothing from elsewhere."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from builders_gpt import gpt_plan
from builders_plan import (
    make_bucket,
    make_plan,
    make_steps,
    plans,
    with_buckets,
    with_inner,
    with_placements,
)
from fcdp_compile.cli import main
from fcdp_compile.plan import Direction, Kind, Lane, Plan, Schedule, Tier, Variant
from fcdp_compile.plan.cost import MACHINES, Slot, Timeline
from fcdp_compile.plan.json import write_plan
from fcdp_compile.plan.kinds import Flow
from fcdp_compile.tools.simulator import simulate
from fcdp_compile.tools.view.story import Story, moved, readable_bytes, tell, tell_sharding
from fcdp_compile.tools.view.timeline_html import timeline_html
from tests.colors import VISION, seen

MACHINE = MACHINES["cuda"]
FOLDER = Path(__file__).parents[2] / "fcdp_compile" / "tools" / "view" / "timeline"
COLD = (Direction.FORWARD, Variant.COLD)
BACKWARD = (Direction.BACKWARD, Variant.COLD)


class Page(HTMLParser):
    """The elements of a page, and the text of each script, as a browser would find them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.scripts and self.cdata_elem == "script":
            self.scripts[-1] += data

    @property
    def data(self) -> Any:
        return json.loads(self.scripts[0])


def page(*shown: Plan, **options: Any) -> Page:
    return Page(timeline_html(shown, MACHINE, **options))


def schedule_of(plan: Plan, key: tuple[Direction, Variant]) -> Schedule:
    return next(s for s in plan.schedules if (s.direction, s.variant) == key)


def story(plan: Plan, key: tuple[Direction, Variant]) -> Story:
    return tell(plan, schedule_of(plan, key))


# The text of the page.

NASTY = [
    "</script><script>alert(1)</script>",
    "<!-- <script>",
    "a\u2028b\x1b[31m\n",
    "{{script}}",
    "&lt;\\u003c",
    "\u00e9\u4e2d\U0001f642",
]


def test_no_name_breaks_out() -> None:
    plan = make_plan()
    bucket = make_bucket(0, [(name, (4,)) for name in NASTY], why=NASTY[0])
    plan = replace(plan, buckets=(bucket, plan.buckets[1]), strategy=NASTY[0])
    text = timeline_html([plan], MACHINE)
    found, plain = Page(text), page(make_plan())
    assert text.isascii()
    assert [tag for tag, _ in found.tags] == [tag for tag, _ in plain.tags]
    assert found.scripts[1] == plain.scripts[1]
    shown = found.data["graphs"][0]["buckets"]["0"]
    assert shown["parameters"][0] == NASTY[0]
    assert shown["why"] == f"{NASTY[0]}; kept"
    assert shown["parameters"][3:5] == NASTY[3:5]


def test_nothing_is_fetched() -> None:
    text = timeline_html([make_plan()], MACHINE)
    assert not re.search(r"https?:|//\w+\.\w|@import|url\((?!#)", text)
    attributes = [(n, v) for _, a in Page(text).tags for n, v in a.items()]
    assert {v for n, v in attributes if n in ("src", "href")} == {"data:,"}
    (policy,) = (v for n, v in attributes if n == "content" and v and "default-src" in v)
    assert policy.startswith("default-src 'none';")
    assert "connect-src" not in policy


def test_scripts_make_no_markup_of_text() -> None:
    sources = {path.name: path.read_text() for path in FOLDER.glob("*.js")}
    assert len(sources) > 3
    for name, source in sources.items():
        found = re.findall(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|fetch\(", source
        )
        assert found == [], name


def test_the_page_holds_every_step() -> None:
    plan = gpt_plan(3, memory_limit_bytes=2**30)
    (graph,) = page(plan).data["graphs"]
    assert graph["memory_limit_bytes"] == plan.memory_limit_bytes
    assert graph["peak_bytes"] == plan.peak_bytes
    assert {int(i) for i in graph["buckets"]} == {b.id for b in plan.buckets}
    for shown, schedule in zip(graph["schedules"], plan.schedules, strict=True):
        assert (shown["direction"], shown["variant"]) == (
            schedule.direction.value,
            schedule.variant.value,
        )
        assert shown["kinds"] == [s.kind.value for s in schedule.steps]
        assert shown["bytes"] == [s.bytes for s in schedule.steps]
        assert [tuple(w) for w in shown["waits"]] == [s.waits for s in schedule.steps]
        assert tuple(shown["memory_bytes"]) == schedule.memory_bytes
        time = simulate(schedule, MACHINE, plan.ranks_per_node)
        assert shown["predicted"]["starts_us"] == pytest.approx(
            [1e6 * s.start_s for s in time.slots], abs=1e-3
        )
        assert shown["predicted"]["ends_us"] == pytest.approx(
            [1e6 * s.end_s for s in time.slots], abs=1e-3
        )
        assert shown["predicted"]["total_us"] == pytest.approx(1e6 * time.total_s, abs=1e-3)
        assert shown["predicted"]["still_us"] == pytest.approx(1e6 * time.exposed_s, abs=0.1)


def test_what_the_model_sends_has_a_lane_of_its_own() -> None:
    """Its bars are within compute steps; without them there is no such lane."""
    plan = with_inner(gpt_plan(3))
    data = page(plan).data
    assert [lane["id"] for lane in data["lanes"]] == [
        "compute",
        "inter",
        "intra",
        "inner",
        "h2d",
        "d2h",
    ]
    for shown, schedule in zip(data["graphs"][0]["schedules"], plan.schedules, strict=True):
        computes = [s for s in schedule.steps if s.kind is Kind.COMPUTE]
        times = shown["predicted"]
        assert [index for index, _, _ in times["inner"]] == [s.index for s in computes]
        for step, (index, start, end) in zip(computes, times["inner"], strict=True):
            assert times["starts_us"][index] <= start
            alone = 1e6 * MACHINE.intra.time_s(step.inner_bytes)
            assert start + alone <= end + 0.01 <= times["ends_us"][index] + 0.02
    plain = page(gpt_plan(3)).data
    assert [lane["id"] for lane in plain["lanes"]] == [lane.value for lane in Lane]
    assert all(s["predicted"]["inner"] == [] for s in plain["graphs"][0]["schedules"])


@given(plan=plans())
def test_any_plan_has_a_page(plan: Plan) -> None:
    graphs = page(plan).data["graphs"]
    assert [len(g["schedules"]) for g in graphs] == (
        [len(plan.schedules)] if plan.schedules else []
    )


def test_compute_says_whose_weights_it_uses() -> None:
    plan = gpt_plan(3)
    shown = page(plan).data["graphs"][0]["schedules"][0]
    used = [
        b for k, b in zip(shown["kinds"], shown["buckets"], strict=True) if k == Kind.COMPUTE.value
    ]
    order = [b for b in used if b is not None]
    assert order == [b.id for b in plan.buckets]


def test_a_bucket_is_called_as_its_module_or_layers() -> None:
    named = {
        "h.3": ["h.3.up.weight", "h.3.down.weight"],
        "h.{3-4,7}": ["h.3.up.weight", "h.4.up.weight", "h.7.down.weight"],
        "wte.weight": ["wte.weight"],
        "wte ...": ["wte", "h.0"],
    }
    plan = make_plan()
    buckets = tuple(
        make_bucket(i, [(n, (4,)) for n in names]) for i, names in enumerate(named.values())
    )
    (graph,) = page(with_buckets(plan, *buckets, refresh=())).data["graphs"]
    assert [b["title"] for b in graph["buckets"].values()] == list(named)


def test_memory_follows_the_program() -> None:
    """Memory of transfers started between two steps counts for the next compute or wait."""
    entries = [(Kind.LOAD, 0, 8), (Kind.INTRA_ALL_GATHER, 0, 8), (Kind.WAIT, 0, 0)]
    entries += [(Kind.FREE, 0, 0), (Kind.LOAD, 1, 8), (Kind.WAIT, 1, 0)]
    schedule = Schedule(
        direction=Direction.FORWARD,
        variant=Variant.WARM,
        steps=make_steps(entries),
        memory_bytes=(10, 50, 40, 40, 20, 30),
    )
    plan = replace(make_plan(), schedules=(schedule,))
    shown = page(plan).data["graphs"][0]["schedules"][0]["predicted"]
    ends = shown["ends_us"]
    assert shown["memory"] == [[0.0, 50, 1], [ends[2], 40, 3]]


def test_measured_times_stand_beside_those_predicted() -> None:
    plan = make_plan()
    forward = schedule_of(plan, COLD)
    slots = tuple(Slot(start_s=0.5 * i, end_s=0.5 * i + 0.25) for i, _ in enumerate(forward.steps))
    measured = Timeline(slots=slots, busy_s={Lane.COMPUTE: 1.0}, total_s=slots[-1].end_s)
    graphs = page(make_plan(), plan, measured={1: {COLD: measured}}).data["graphs"]
    assert [s["measured"] for s in graphs[0]["schedules"]] == [None] * 3
    first, *others = graphs[1]["schedules"]
    assert [s["measured"] for s in others] == [None] * 2
    assert first["measured"]["starts_us"] == [5e5 * i for i, _ in enumerate(slots)]
    assert first["measured"]["still_us"] == pytest.approx(1e6 * (measured.total_s - 0.25))
    short = replace(measured, slots=slots[1:])
    with pytest.raises(
        ValueError, match=r"times of 7 steps do not belong to the 8 steps of forward"
    ):
        timeline_html([plan], MACHINE, measured={0: {COLD: short}})


def test_the_command_prints_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i in range(2):
        write_plan(tmp_path / f"graph-{i:03d}.plan.json", make_plan(graph=i))
    assert main(["dump", str(tmp_path), "--format", "html", "--machine", "cpu"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("<!doctype html>")
    assert out.endswith("</html>\n")
    assert [g["title"] for g in Page(out).data["graphs"]] == ["graph 0", "graph 1"]
    assert Page(out).data["speeds"]["inter"]["bytes_per_s"] == 125e6
    main(["dump", str(tmp_path), "--format", "html", "--graph", "backward"])
    graphs = Page(capsys.readouterr().out).data["graphs"]
    assert [[s["direction"] for s in g["schedules"]] for g in graphs] == [["backward"]] * 2


# What it says.


def test_every_step_that_moves_something_belongs_to_a_flow() -> None:
    assert {k for k in Kind if k.flow is None} == {Kind.COMPUTE, Kind.WAIT, Kind.FREE}
    for plan in (make_plan(), gpt_plan(3), gpt_plan(3, strategy="zero3+ho_ring")):
        for schedule in plan.schedules:
            assert sum(moved(schedule).values()) == sum(s.bytes for s in schedule.steps)


def test_cached_on_the_host() -> None:
    """The main claim: the backward gathers nothing between nodes."""
    plan = gpt_plan(3)
    crossing = readable_bytes(moved(schedule_of(plan, COLD))[Flow.WEIGHTS_BETWEEN])
    kept = readable_bytes(sum(b.node_bytes for b in plan.buckets))
    assert story(plan, COLD) == (
        f"The forward gathers {crossing} a rank between nodes.",
        (
            f"Each rank keeps what it gathered ({kept}) in host memory: the next use of the kept "
            "parameters needs no other node."
        ),
    )
    assert story(plan, BACKWARD) == (
        "The backward gathers nothing between nodes.",
        (
            f"What the forward gathered ({kept} a rank) waited in host memory and is loaded over the bus. "
            f"Only gradients cross: {crossing} a rank."
        ),
    )
    assert story(plan, (Direction.FORWARD, Variant.WARM)).headline == (
        "The forward gathers nothing between nodes."
    )
    waits = story(plan, (Direction.BACKWARD, Variant.ACCUMULATE))
    assert waits.headline == "The backward sends nothing between nodes."
    assert waits.text.endswith("they wait for the gradients of the next micro-batch.")


def test_gathered_again() -> None:
    plan = gpt_plan(3, strategy="zero3")
    crossing = readable_bytes(moved(schedule_of(plan, BACKWARD))[Flow.WEIGHTS_BETWEEN])
    assert story(plan, COLD).text == "No copy is kept: a gathered parameter lives for one use."
    assert story(plan, BACKWARD) == (
        "The backward gathers every parameter between nodes again.",
        (
            f"{crossing} a rank cross the slow network a second time, as the forward did not keep them. "
            f"Gradients cross, too: {crossing} a rank."
        ),
    )


def test_frozen_weights_never_cross() -> None:
    plan = gpt_plan(3, frozen=True)
    for schedule in plan.schedules:
        assert moved(schedule)[Flow.WEIGHTS_BETWEEN] == 0
    headline, text = story(plan, BACKWARD)
    assert headline == "The backward sends nothing between nodes."
    assert text.startswith("What was gathered before the first step and never changed (")
    assert text.endswith("There are no gradients to send, as no parameter here is trained.")


def test_only_steps_and_tiers_decide_what_is_said() -> None:
    """A strategy's name is only for people: a plan's page says the same under another name."""
    plan = gpt_plan(3)
    renamed = replace(plan, strategy="zero3")
    for schedule in plan.schedules:
        assert tell(plan, schedule) == tell(renamed, schedule)
    on_gpu = with_placements(plan, tier=Tier.GPU)
    assert "waited on the GPU and is used where it is." in story(on_gpu, BACKWARD).text
    mixed = with_placements(plan, bucket=plan.buckets[0].id, tier=Tier.GPU)
    assert "waited partly on the GPU, partly in host memory" in story(mixed, BACKWARD).text


def test_some_buckets_found_no_room() -> None:
    a, b = (make_bucket(i, [(f"h.{i}.w", (64, 64))]) for i in range(2))
    entries = [
        (Kind.INTER_ALL_GATHER, 0, a.slot_bytes),
        (Kind.INTRA_ALL_GATHER, 0, a.node_bytes),
        (Kind.LOAD, 1, b.node_bytes),
        (Kind.INTRA_ALL_GATHER, 1, b.node_bytes),
    ]
    schedule = Schedule(
        direction=Direction.BACKWARD, variant=Variant.COLD, steps=make_steps(entries)
    )
    plan = with_buckets(make_plan(), a, b, refresh=(), schedules=(schedule,))
    plan = with_placements(plan, bucket=a.id, tier=Tier.NONE)
    headline, text = tell(plan, schedule)
    assert headline == "The backward gathers 1 of 2 buckets between nodes again."
    assert f"What the forward gathered ({readable_bytes(b.node_bytes)} a rank) waited" in text


@pytest.mark.parametrize(
    ("nodes", "ranks_per_node", "expected"),
    [
        (
            2,
            4,
            "each rank owns 1/8 of every parameter. To compute a layer, its parts come together: between",
        ),
        (
            2,
            1,
            "each rank owns 1/2 of every parameter. To compute a layer, its parts come together between",
        ),
        (1, 4, "each rank owns 1/4 of every parameter, each node all of them."),
        (1, 1, "every rank has the whole of every parameter."),
    ],
)
def test_who_owns_what(nodes: int, ranks_per_node: int, expected: str) -> None:
    strategy = "zero3" if nodes > 1 else "mics" if ranks_per_node > 1 else "ddp"
    bucket = make_bucket(
        0, [("w", (8,))], nodes=nodes, ranks_per_node=ranks_per_node, strategy=strategy
    )
    plan = replace(make_plan(), buckets=(bucket,), refresh=(), schedules=())
    assert tell_sharding(plan).startswith(f"2 nodes of 2 ranks; {expected}")


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (3 * 2**19, "1.50 MiB"),
        (9 * 2**17, "1.13 MiB"),  # 1.125: halves go up, as in the script of the page
        (49 * 2**28, "12.3 GiB"),
        (992 * 2**20, "992 MiB"),
    ],
)
def test_bytes_are_readable(size: int, text: str) -> None:
    assert readable_bytes(size) == text


# Its colours.


def themes() -> dict[str, dict[str, str]]:
    css = (FOLDER / "page.css").read_text()
    light, dark = (
        dict(re.findall(r"--([\w-]+): (#\w{6});", block))
        for block in re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    )
    return {"light": light, "dark": light | dark}


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_kinds_of_one_lane_differ_with_any_colour_vision(theme: str, vision: str) -> None:
    colors = themes()[theme]
    lanes: dict[str, list[str]] = {}
    for kind in page(make_plan()).data["kinds"]:
        if kind["flow"]:
            lanes.setdefault(kind["lane"], []).append(kind["id"])
    assert set(lanes) == {"inter", "intra", "h2d", "d2h"}
    for kinds in lanes.values():
        for a, b in itertools.combinations(kinds, 2):
            x, y = seen(colors[a], vision), seen(colors[b], vision)
            distance = sum((p - q) ** 2 for p, q in zip(x, y, strict=True)) ** 0.5
            assert distance > 12, f"{a} and {b}"  # 2.3 is just noticeable side by side
