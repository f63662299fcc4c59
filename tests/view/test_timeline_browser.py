"""The page of a plan in a real browser: its drawing, its controls, and that it stays offline."""

from __future__ import annotations

import itertools
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from builders_gpt import gpt_plan
from builders_plan import make_bucket, make_plan, with_inner
from fcdp_compile.plan import Direction, Kind, Lane, Plan, Schedule, Tier, Variant
from fcdp_compile.plan.cost import MACHINES, Link
from fcdp_compile.tools.simulator import simulate
from fcdp_compile.tools.view.story import readable_bytes
from fcdp_compile.tools.view.timeline_html import timeline_html
from tests.colors import contrast, luminance

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")
LIMIT_BYTES = 4 * 2**30
MACHINE = replace(MACHINES["cuda"], inter=Link(latency_s=50e-6, bytes_per_s=12.5e9))
COLD = (Direction.FORWARD, Variant.COLD)
BACKWARD = (Direction.BACKWARD, Variant.COLD)


@dataclass
class Opened:
    """An opened page, with its errors and its requests."""

    page: Any
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def axis(self) -> tuple[float, float]:
        self.settle()
        figure = self.page.locator("#figure")
        return float(figure.get_attribute("data-start")), float(figure.get_attribute("data-end"))

    def settle(self) -> None:
        """Wait until the page has drawn a change: two frames."""
        self.page.evaluate(
            "new Promise(f => requestAnimationFrame(() => requestAnimationFrame(f)))"
        )

    def bar(self, kind: Kind, *, part: int = 0, row: str = "predicted") -> Any:
        chosen = f'[data-kind="{kind.value}"][data-part="{part}"][data-row="{row}"]'
        return self.page.locator(f"#plot rect.bar{chosen}")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = next((p for p in map(shutil.which, BROWSERS) if p), None)
    if path is None:
        pytest.skip(f"no browser on PATH: none of {', '.join(BROWSERS)}")
    with sync_api.sync_playwright() as playwright:
        # Root cannot use the sandbox; the page is our own and may fetch nothing.
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def forty() -> Plan:
    return gpt_plan(40, hidden=1024, memory_limit_bytes=LIMIT_BYTES)


@pytest.fixture(params=["light", "dark"])
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Any]:
    """Opens plans; at the end of the test, no page may have reported an error or fetched anything."""
    opened: list[Opened] = []

    def open_page(*plans: Plan, scheme: str = "light", **options: Any) -> Opened:
        file = tmp_path / f"page-{len(opened)}.html"
        file.write_text(timeline_html(plans, MACHINE, **options), encoding="ascii")
        page = browser.new_page(viewport={"width": 1400, "height": 900}, color_scheme=scheme)
        found = Opened(page)
        opened.append(found)
        page.on("console", lambda message: found.complaints.append(message.text))
        page.on("pageerror", lambda error: found.complaints.append(str(error)))
        page.on("request", lambda request: found.requests.append(request.url))
        page.goto(file.as_uri())
        page.wait_for_selector("#figure[data-bars]")
        return found

    yield open_page
    for found in opened:
        found.settle()
        assert found.complaints == []
        asked = [u for u in found.requests if not u.startswith("data:")]
        assert [u.rpartition(".")[2] for u in asked] == ["html"]
        found.page.close()


@pytest.mark.rare
def test_forty_layers_on_five_lanes(show: Any, forty: Plan) -> None:
    opened = show(forty)
    labels = opened.page.locator("#gutter .lane")
    shown = [labels.nth(i).get_attribute("data-lane") for i in range(labels.count())]
    assert shown == [*(lane.value for lane in Lane), "memory"]
    start, end = opened.axis()
    assert start == 0
    totals = [
        simulate(s, MACHINE, forty.ranks_per_node).total_s
        for s in forty.schedules
        if (s.direction, s.variant) in (COLD, BACKWARD)
    ]
    assert end == pytest.approx(1e6 * sum(totals), rel=1e-4)
    for kind in (Kind.INTER_ALL_GATHER, Kind.STORE):
        assert opened.bar(kind, part=0).count() > 30
        assert opened.bar(kind, part=1).count() == 0
    assert opened.bar(Kind.LOAD, part=1).count() > 30
    assert opened.bar(Kind.INTER_REDUCE_SCATTER, part=1).count() > 30
    assert opened.bar(Kind.WAIT, part=0).count() > 0


def test_somebody_new_can_read_why_the_backward_gathers_nothing(show: Any, forty: Plan) -> None:
    backward = show(forty).page.locator('.story[data-direction="backward"]')
    assert backward.locator("h2").inner_text() == "The backward gathers nothing between nodes."
    assert "waited in host memory and is loaded over the bus" in backward.inner_text()
    flow = backward.locator('[data-flow="weights_between"]')
    assert (flow.get_attribute("data-bytes"), flow.text_content()) == ("0", "no weights")
    assert int(backward.locator('[data-flow="weights_from_host"]').get_attribute("data-bytes")) > 0
    assert "no weights" in show(forty).page.locator("#plot .part").nth(1).text_content()


def test_zooming_and_panning_change_the_axis(show: Any, forty: Plan) -> None:
    opened = show(forty)
    page, whole = opened.page, opened.axis()
    box = page.locator("#plot").bounding_box()
    x, y = box["x"] + 0.25 * box["width"], box["y"] + 100
    page.mouse.move(x, y)
    page.mouse.wheel(0, -300)
    page.wait_for_function(f"document.getElementById('figure').dataset.end < {whole[1]}")
    start, end = opened.axis()
    under_pointer = 0.25 * whole[1]
    assert start + 0.25 * (end - start) == pytest.approx(under_pointer, rel=1e-2)
    page.mouse.down()
    page.mouse.move(x - 100, y, steps=4)
    page.mouse.up()
    panned = opened.axis()
    assert panned[0] - start == pytest.approx(100 / box["width"] * (end - start), rel=1e-2)
    page.locator("#figure").focus()
    page.keyboard.press("0")
    assert opened.axis() == whole
    page.keyboard.press("+")
    assert opened.axis()[1] < whole[1]
    page.keyboard.press("-")
    page.locator("#zoom-in").click()
    assert opened.axis()[1] - opened.axis()[0] == pytest.approx(whole[1] / 2)
    page.get_by_role("button", name="Backward", exact=True).click()
    assert opened.axis() == (pytest.approx(opened.axis()[0]), pytest.approx(whole[1]))
    assert opened.bar(Kind.INTER_ALL_GATHER).count() == 0
    page.get_by_role("button", name="All").click()
    assert opened.axis() == whole


def test_hovering_shows_parameters_and_bytes(show: Any) -> None:
    plan = gpt_plan(4, memory_limit_bytes=LIMIT_BYTES)
    opened = show(plan)
    page, gather = opened.page, opened.bar(Kind.INTER_ALL_GATHER).nth(2)
    step = plan.schedules[0].steps[int(gather.get_attribute("data-step"))]
    assert step.bucket is not None
    bucket = plan.bucket(step.bucket)
    assert page.locator("#tooltip").is_hidden()
    gather.hover()
    told = page.locator("#tooltip").inner_text()
    for expected in (
        *(p.name for p in bucket.params),
        f"{step.bytes:,} bytes",
        "inter all gather",
        "in host memory",
        bucket.why,
    ):
        assert expected in told
    gather.click()
    page.mouse.move(0, 0)
    page.wait_for_selector("#tooltip", state="hidden")
    assert f"{step.bytes:,} bytes" in page.locator("#details").inner_text()
    assert page.locator("#plot .bar.chosen").count() == 1
    assert page.locator("#plot .link").count() == len(step.waits)


def test_the_keyboard_reaches_every_lane(show: Any) -> None:
    opened = show(gpt_plan(4))
    page = opened.page
    page.locator("#figure").focus()
    found = []
    for key in ("ArrowRight", "ArrowDown", "ArrowDown", "ArrowDown", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
        opened.settle()
        found.append(page.locator("#details .heading span").nth(1).inner_text())
    assert found[2:] == ["intra all gather", "load", "store", "store"]
    assert found[1] in ("inter all gather", "inter reduce scatter")
    first = page.locator("#details").inner_text()
    page.keyboard.press("ArrowLeft")
    assert page.locator("#details").inner_text() != first
    page.locator("#details button").first.click()  # the step it waits for
    assert "store" not in page.locator("#details .heading").inner_text()
    page.locator("#figure").focus()
    page.keyboard.press("Escape")
    assert "Point at a bar" in page.locator("#details").inner_text()


def test_the_keyboard_keeps_its_place(show: Any) -> None:
    """A pressed button is made anew, and the next press must find it; a followed link leads to the lanes."""
    opened = show(gpt_plan(4))
    page = opened.page
    for selector in ('[data-variant="forward warm"]', '[data-variant="backward cold"]'):
        page.locator(selector).focus()
        page.keyboard.press("Enter")
        opened.settle()
        assert page.evaluate(f"document.activeElement.matches('{selector}')")
    page.locator("#figure").focus()
    for key in ("ArrowRight", "ArrowDown", "ArrowDown"):
        page.keyboard.press(key)
    page.locator("#details button").first.focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "figure"


def test_the_other_buttons_of_a_mouse_move_nothing(show: Any) -> None:
    opened = show(gpt_plan(4))
    page = opened.page
    opened.bar(Kind.INTER_ALL_GATHER).first.hover()
    page.mouse.down(button="right")
    page.mouse.up(button="right")
    opened.settle()
    assert page.locator("#plot .bar.chosen").count() == 0


def _repeated(schedule: Schedule, times: int) -> Schedule:
    steps = tuple(
        replace(step, index=step.index + first, waits=tuple(i + first for i in step.waits))
        for first in range(0, times * len(schedule.steps), len(schedule.steps))
        for step in schedule.steps
    )
    return replace(schedule, steps=steps, memory_bytes=times * schedule.memory_bytes)


def test_of_many_steps_a_pixel_shows_each_kind_once(show: Any) -> None:
    """Waits and computes take turns, so that bars of one kind are never neighbours."""
    plan = gpt_plan(4)
    opened = show(replace(plan, schedules=(_repeated(plan.schedules[0], 500),)))
    drawn = opened.page.evaluate(
        """() => [...document.querySelectorAll("#plot rect.bar")].map((bar) => {
          const at = (name) => Number(bar.getAttribute(name));
          return `${bar.dataset.kind} ${at("y")} ${Math.floor(at("x") + at("width"))}`;
        })"""
    )
    assert len(drawn) > 1000
    # The gap at the right of a bar may move the bar into the pixel before.
    assert max(Counter(drawn).values()) <= 2


def test_memory_and_its_limit_are_drawn(show: Any, forty: Plan) -> None:
    opened = show(forty)
    page = opened.page
    assert page.locator("#plot .curve").count() == 2
    limit = page.locator("#limit")
    assert limit.get_attribute("data-bytes") == str(LIMIT_BYTES)
    assert "limit 4.00 GiB" in page.locator("#plot .limit-name").text_content()
    box, plot = (
        page.locator("#plot .curve").first.bounding_box(),
        page.locator("#plot").bounding_box(),
    )
    assert box["y"] > limit.bounding_box()["y"]  # the made-up curve is below its limit
    assert box["x"] == pytest.approx(plot["x"], abs=12)
    page.mouse.move(plot["x"] + 50, plot["y"] + plot["height"] - 20)
    told = {f"{readable_bytes(m)} in use" for s in forty.schedules for m in s.memory_bytes}
    assert page.locator("#memory-here").text_content() in told


def test_without_a_prediction_it_says_how_to_get_one(show: Any) -> None:
    page = show(make_plan()).page
    assert "device_memory" in page.locator("#no-memory").text_content()
    assert page.locator("#plot .curve").count() == page.locator("#limit").count() == 0


def test_other_variants_and_graphs_can_be_chosen(show: Any) -> None:
    opened = show(gpt_plan(4), make_plan(graph=7))
    page = opened.page
    assert opened.bar(Kind.INTER_ALL_GATHER).count() > 0
    page.locator('[data-variant="forward warm"]').click()
    opened.settle()
    assert opened.bar(Kind.INTER_ALL_GATHER).count() == 0
    assert opened.bar(Kind.LOAD).count() > 0
    titles = page.locator("#graph option").all_inner_texts()
    assert [t.partition(",")[0] for t in titles] == [
        "1: the whole step",
        "2: graph 0",
        "3: graph 7",
    ]
    page.locator("#graph").select_option("2")
    opened.settle()
    assert opened.bar(Kind.INTER_ALL_GATHER).count() == 1
    assert page.locator(".story").count() == 2


def test_measured_times_are_a_second_row(show: Any) -> None:
    plan = gpt_plan(4)
    slower = replace(MACHINE, flops_per_s=MACHINE.flops_per_s / 2)
    measured = {
        (s.direction, s.variant): simulate(s, slower, plan.ranks_per_node)
        for s in plan.schedules
        if (s.direction, s.variant) in (COLD, BACKWARD)
    }
    opened = show(plan, measured={0: measured})
    page = opened.page
    assert opened.axis()[1] == pytest.approx(
        1e6 * sum(t.total_s for t in measured.values()), rel=1e-4
    )
    first = [opened.bar(Kind.COMPUTE, part=1, row=r).first for r in ("predicted", "measured")]
    boxes = [bar.bounding_box() for bar in first]
    assert boxes[0]["x"] == pytest.approx(boxes[1]["x"], abs=3)  # both backwards start together
    assert boxes[1]["y"] > boxes[0]["y"]
    page.get_by_role("button", name="Predicted").click()
    opened.settle()
    assert opened.bar(Kind.COMPUTE, row="measured").count() == 0
    page.get_by_role("button", name="Measured").click()
    opened.settle()
    assert opened.bar(Kind.COMPUTE, row="predicted").count() == 0
    assert opened.bar(Kind.COMPUTE, row="measured").count() > 0


def test_what_the_model_sends_is_a_lane(show: Any) -> None:
    """With labels that do not overlap, and with nothing measured: nobody records parts of steps."""
    plan = with_inner(gpt_plan(4))
    measured = {
        (s.direction, s.variant): replace(simulate(s, MACHINE, 2), inner={}) for s in plan.schedules
    }
    opened = show(plan, measured={0: measured})
    page = opened.page
    lanes = page.locator("#gutter .lane")
    shown = [lanes.nth(i).get_attribute("data-lane") for i in range(lanes.count())]
    assert shown == ["compute", "inter", "intra", "inner", "h2d", "d2h", "memory"]
    assert page.locator("#gutter .row").all_inner_texts().count("measured") == len(Lane)
    for width, rows in itertools.product((390, 1400), ("Both", "Predicted")):
        page.get_by_role("button", name=rows).click()
        page.set_viewport_size({"width": width, "height": 900})
        opened.settle()
        boxes = [
            [lanes.nth(i).locator(part).bounding_box() for part in ("b", "span")]
            for i in range(lanes.count())
        ]
        edges = [[(b["y"], b["y"] + b["height"]) for b in pair if b] for pair in boxes]
        assert all(above[-1][1] <= below[0][0] for above, below in itertools.pairwise(edges))
    bar = page.locator('#plot rect.bar[data-kind="model_collectives"]').first
    whole = page.locator('#plot rect.bar[data-kind="compute"][data-part="0"]').first
    inner, outer = bar.bounding_box(), whole.bounding_box()
    assert inner["x"] >= outer["x"] - 1
    assert inner["x"] + inner["width"] <= outer["x"] + outer["width"] + 1
    bar.hover(force=True)
    assert f"{4 * 2**20:,} bytes" in page.locator("#tooltip").inner_text()
    bar.click(force=True)
    page.locator("#details button").first.click()  # the step that it is a part of
    opened.settle()
    assert page.locator("#plot .bar.chosen").get_attribute("data-kind") == "compute"


def test_names_become_text(show: Any) -> None:
    name = "<img src=x onerror=alert(1)></script><b>w</b>"
    plan = make_plan()
    bucket = make_bucket(0, [(name, (512, 512))], frozen=True, why=name)
    opened = show(replace(plan, buckets=(bucket, plan.buckets[1]), strategy=name))
    assert opened.page.locator("img, b b, #title *").count() == 0
    assert name in opened.page.locator("#title").inner_text()
    opened.bar(Kind.LOAD).first.hover()
    assert name in opened.page.locator("#tooltip").inner_text()


def test_a_plan_without_steps_says_so(browser: Any, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(timeline_html([replace(make_plan(), schedules=())], MACHINE))
    page = browser.new_page()
    page.goto(file.as_uri())
    assert "no steps" in page.locator("#sharding").inner_text()
    page.close()


# Contrast by WCAG 2.2: 4.5 for text, 3 for other things that one must see.

COLORS = """() => {
  const texts = [];
  const ground = (node) => {
    for (let n = node; n; n = n.parentElement) {
      const color = getComputedStyle(n).backgroundColor;
      if (!/, 0\\)$/.test(color)) return color;
    }
    return "rgb(255, 255, 255)";
  };
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((c) => c.nodeType === 3 && c.textContent.trim());
    if (!own || !node.getClientRects().length || ["SCRIPT", "OPTION"].includes(node.tagName)) continue;
    const isDrawn = node.namespaceURI.endsWith("svg");
    const style = getComputedStyle(node);
    texts.push([node.textContent.slice(0, 30), node.classList.contains("caption"),
                isDrawn ? style.fill : style.color, ground(node)]);
  }
  const style = (selector) => getComputedStyle(document.querySelector(selector));
  const drawn = [...document.querySelectorAll("#plot rect.bar")];
  const bars = drawn.map((bar) => [bar.dataset.kind, getComputedStyle(bar).fill]);
  const others = ["#plot .limit", "#plot .curve"].map((s) => [s, style(s).stroke]);
  const band = style("#plot .band").fill;
  const card = getComputedStyle(document.getElementById("timeline")).backgroundColor;
  return { texts, bars, others, grounds: [band, card] };
}"""


def test_everything_has_contrast(show: Any, scheme: str) -> None:
    plan = with_inner(gpt_plan(4, memory_limit_bytes=LIMIT_BYTES))
    opened = show(plan, scheme=scheme)
    opened.bar(Kind.INTER_ALL_GATHER).first.click()
    opened.settle()
    found = opened.page.evaluate(COLORS)
    dark_ground = luminance(found["grounds"][0]) < 0.1
    assert dark_ground == (scheme == "dark")
    bars = {kind: fill for kind, fill in found["bars"] if not fill.startswith("url")}
    assert {"compute", "model_collectives", "inter_all_gather", "load", "store"} <= bars.keys()
    for what, color in [*bars.items(), *found["others"]]:
        assert min(contrast(color, ground) for ground in found["grounds"]) >= 3, what
    captions = [color for _, is_caption, color, _ in found["texts"] if is_caption]
    assert captions
    for kind, fill in bars.items():
        assert contrast(captions[0], fill) >= 4.5, kind
    assert len(found["texts"]) > 50
    for text, is_caption, color, ground in found["texts"]:
        if not is_caption:
            assert contrast(color, ground) >= 4.5, f"{text!r}: {color} on {ground}"


def test_a_plan_on_the_gpu_moves_nothing_over_the_bus(show: Any) -> None:
    plan = gpt_plan(4, strategy="zero++")
    assert {p.tier for p in plan.placements} == {Tier.GPU}
    opened = show(plan)
    backward = opened.page.locator('.story[data-direction="backward"]')
    assert "waited on the GPU and is used where it is" in backward.inner_text()
    assert backward.locator('[data-flow="weights_from_host"]').get_attribute("data-bytes") == "0"
    opened.bar(Kind.LOAD, part=1).first.hover(force=True)
    assert "nothing: it is where it is used" in opened.page.locator("#tooltip").inner_text()


def test_a_narrow_screen_and_long_names(show: Any) -> None:
    """Headings of parts do not overlap; labels of bars leave out the common beginning of all names."""
    plan = gpt_plan(6, hidden=1024)
    adapted = [
        replace(b, params=tuple(replace(p, name=f"base_model.model.{p.name}") for p in b.params))
        for b in plan.buckets
    ]
    opened = show(replace(plan, buckets=tuple(adapted)))
    captions = opened.page.locator("#plot .caption")
    texts = set(captions.all_text_contents())
    assert len(texts) > 3, texts
    assert not any(text.startswith("base") for text in texts)
    opened.page.set_viewport_size({"width": 390, "height": 800})
    opened.settle()
    boxes = opened.page.locator("#plot .part").evaluate_all(
        "all => all.map(e => e.getBoundingClientRect()).map(r => [r.left, r.right])"
    )
    assert len(boxes) == 2
    assert boxes[0][1] < boxes[1][0]
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= 390
