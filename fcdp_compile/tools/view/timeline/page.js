// Puts the page together, and lets the reader move in it.

const figure = document.getElementById("figure");
const plot = document.getElementById("plot");
const layer = plot.appendChild(drawn("g"));
const cursor = plot.appendChild(drawn("g"));

// What follows from the state: parts, lanes and bars of the schedules shown, and the size of the drawing.
let view = { parts: [], rows: [], lanes: [], bars: new Map(), width: 1, height: 1, memoryTop: 0, memoryMost: 1 };
let isDrawing = false;

// Change what is shown, and show all of it.
function show(change) {
  const focused = document.activeElement?.dataset.key;
  Object.assign(state, change, { chosen: null, near: null });
  const parts = partsShown();
  view = { ...layOut(parts), width: view.width };
  drawTitle();
  drawChoices();
  drawStories(parts);
  drawLegend();
  drawDetails();
  resize();
  look(0, total());
  // What was pressed has been made anew.
  if (focused) document.querySelector(`[data-key="${focused}"]`)?.focus({ preventScroll: true });
}

function resize() {
  view.width = Math.max(1, plot.getBoundingClientRect().width);
  plot.style.height = `${view.height}px`;
  document.getElementById("gutter").style.height = `${view.height}px`;
  drawGutter();
  redraw();
}

// At most once a frame.
function redraw() {
  if (isDrawing) return;
  isDrawing = true;
  requestAnimationFrame(() => {
    isDrawing = false;
    draw();
  });
}

function draw() {
  const captions = drawn("g");
  layer.replaceChildren();
  drawGround(layer);
  drawAxis(layer);
  const count = drawBars(layer, captions);
  layer.append(captions);
  drawMemory(layer);
  drawLinks(layer);
  Object.assign(figure.dataset, { start: state.start, end: state.end, total: total(), bars: count });
}

function drawTitle() {
  const shown = graph();
  const what = view.parts.some((p) => p.direction === "backward") ? "One training step" : "One pass";
  document.getElementById("title").textContent = `${what} of one rank, as ${shown.strategy} plans it`;
  document.getElementById("sharding").textContent = shown.sharding;
  const { inter, intra, h2d, d2h, flops_per_s: flops } = DATA.speeds;
  const rate = (link) => `${Number((link.bytes_per_s / 1e9).toPrecision(3))} GB/s`;
  const speeds = `${rate(inter)} between nodes, ${rate(intra)} within, ${rate(h2d)} and ${rate(d2h)} to and from the GPU`;
  const teraflops = `${Number((flops / 1e12).toPrecision(3))} TFLOP/s`;
  document.getElementById("speeds").textContent = `Predicted with ${speeds}, ${teraflops}.`;
}

function drawChoices() {
  const choices = [];
  if (DATA.graphs.length > 1) {
    const select = element("select", { id: "graph", "data-key": "graph" });
    DATA.graphs.forEach((g, i) => {
      const directions = [...new Set(g.schedules.map((s) => NAMES[s.direction].toLowerCase()))].join(" and ");
      const option = element("option", { value: i }, `${i + 1}: ${g.title}, ${directions}`);
      option.selected = i === state.graph;
      select.append(option);
    });
    select.addEventListener("change", () => show({ graph: Number(select.value), variants: {} }));
    choices.push(element("label", {}, "Compiled graph", select));
  }
  document.getElementById("choices").replaceChildren(...choices);
  drawRowChoice();
  const spans = [button("All", false, () => look(0, total()))];
  for (const part of view.parts.length > 1 ? view.parts : []) {
    const fit = () => look(part.offset, part.offset + part.length);
    spans.push(button(NAMES[part.direction], false, fit));
  }
  for (const made of spans) made.removeAttribute("aria-pressed");
  document.getElementById("spans").replaceChildren(...spans);
}

function drawRowChoice() {
  const place = document.getElementById("rows");
  place.replaceChildren();
  if (!view.parts.some((p) => p.schedule.measured)) return;
  for (const [text, rows] of [["Predicted", ["predicted"]], ["Measured", ["measured"]], ["Both", ROWS]]) {
    const made = button(text, rows.join() === state.rows.join(), () => show({ rows }));
    made.dataset.key = `rows ${rows.join(" ")}`;
    place.append(made);
  }
}

function drawLegend() {
  const used = new Set(view.parts.flatMap((p) => p.schedule.kinds));
  if (view.parts.some((p) => p.schedule.inner_bytes.some(Boolean))) used.add(INNER);
  const shown = DATA.kinds.filter((kind) => used.has(kind.id) && kind.id !== "free");
  const groups = [];
  for (const [title, prefix] of [["", ""], ["Weights", "weights"], ["Gradients", "gradients"]]) {
    const mine = shown.filter((kind) => (kind.flow ?? "").split("_")[0] === prefix);
    if (!mine.length) continue;
    const list = element("ul", {}, ...(title ? [element("li", { class: "group" }, title)] : []));
    for (const kind of mine) {
      const name = kind.id === "wait" ? "wait: compute stands still" : kind.id.replaceAll("_", " ");
      list.append(element("li", { "data-kind": kind.id, title: kind.text }, element("span", { class: "swatch" }), name));
    }
    groups.push(list);
  }
  document.getElementById("legend").replaceChildren(...groups);
}

function choose(bar, isInView) {
  Object.assign(state, { chosen: bar, near: null });
  drawDetails();
  drawTooltip(0, 0);
  if (isInView && bar && (bar.end < state.start || bar.start > state.end)) {
    const half = (state.end - state.start) / 2;
    look((bar.start + bar.end) / 2 - half, (bar.start + bar.end) / 2 + half);
  }
  redraw();
}

function point(event) {
  const box = plot.getBoundingClientRect();
  return [event.clientX - box.left, event.clientY - box.top];
}

function hover(event) {
  const [x, y] = point(event);
  const near = barAt(x, y);
  if (near !== state.near) {
    state.near = near;
    redraw();
  }
  drawTooltip(event.clientX, event.clientY);
  cursor.replaceChildren(drawn("line", { class: "cursor", x1: x, x2: x, y1: HEAD, y2: view.height }));
  const bytes = y >= view.memoryTop ? memoryAt(toTime(x)) : null;
  if (bytes === null) return;
  const anchor = x > view.width - 160 ? ["end", -8] : ["start", 8];
  const place = { class: "part", id: "memory-here", x: x + anchor[1], y: toY(bytes) - 6, "text-anchor": anchor[0] };
  cursor.append(drawn("text", place, `${bytesText(bytes)} in use`));
}

function leave() {
  state.near = null;
  cursor.replaceChildren();
  drawTooltip(0, 0);
  redraw();
}

let grabbed = null;

plot.addEventListener("pointerdown", (event) => {
  if (event.button !== 0) return; // of a menu nobody says when it is over
  const [x] = point(event);
  grabbed = { x, start: state.start, end: state.end, hasMoved: false };
  plot.setPointerCapture(event.pointerId);
});

plot.addEventListener("pointermove", (event) => {
  if (!grabbed) return hover(event);
  const [x] = point(event);
  if (Math.abs(x - grabbed.x) > 3) grabbed.hasMoved = true;
  if (!grabbed.hasMoved) return undefined;
  plot.classList.add("dragging");
  const moved = ((grabbed.x - x) / view.width) * (grabbed.end - grabbed.start);
  return look(grabbed.start + moved, grabbed.end + moved);
});

plot.addEventListener("pointerup", (event) => {
  plot.classList.remove("dragging");
  if (grabbed && !grabbed.hasMoved) choose(barAt(...point(event)), false);
  grabbed = null;
});

plot.addEventListener("pointercancel", () => {
  plot.classList.remove("dragging");
  grabbed = null;
});

plot.addEventListener("pointerleave", leave);

plot.addEventListener(
  "wheel",
  (event) => {
    const isSideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (isWhole() && (isSideways || event.deltaY > 0)) return; // nothing to do here: the page scrolls
    event.preventDefault();
    const [x] = point(event);
    if (isSideways) pan((event.deltaX || event.deltaY) * (toTime(1) - toTime(0)));
    else zoom(Math.exp(Math.max(-100, Math.min(100, event.deltaY)) / 300), toTime(x));
  },
  { passive: false },
);

// The next step of the chosen one's lane, or the one that is nearest in time on the next lane.
function walk(along, across) {
  const bar = state.chosen ?? state.near;
  if (!bar) {
    const first = view.lanes.map((lane) => view.bars.get(`${lane.id} ${view.rows[0]}`)).find((bars) => bars.length);
    return first ? choose(first[Math.max(0, first.findIndex((b) => b.end > state.start))], true) : undefined;
  }
  const lanes = view.lanes.filter((lane) => view.bars.get(`${lane.id} ${bar.row}`).length);
  const at = lanes.findIndex((lane) => lane.id === bar.lane);
  const lane = lanes[Math.min(lanes.length - 1, Math.max(0, at + across))];
  const bars = view.bars.get(`${lane.id} ${bar.row}`);
  if (lane.id === bar.lane) {
    const next = bars.findIndex((b) => isSame(b, bar)) + along;
    return choose(bars[Math.min(bars.length - 1, Math.max(0, next))], true);
  }
  const away = (b) => Math.abs(b.start - bar.start);
  return choose(bars.reduce((a, b) => (away(b) < away(a) ? b : a)), true);
}

const KEYS = {
  "+": () => zoom(0.7),
  "=": () => zoom(0.7),
  "-": () => zoom(1 / 0.7),
  0: () => look(0, total()),
  ArrowLeft: () => walk(-1, 0),
  ArrowRight: () => walk(1, 0),
  ArrowUp: () => walk(0, -1),
  ArrowDown: () => walk(0, 1),
  PageUp: () => pan((state.start - state.end) / 2),
  PageDown: () => pan((state.end - state.start) / 2),
  Home: () => look(0, state.end - state.start),
  End: () => look(total() - (state.end - state.start), total()),
  Escape: () => choose(null, false),
};

figure.addEventListener("keydown", (event) => {
  const action = KEYS[event.key];
  if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  action();
});

document.getElementById("zoom-in").addEventListener("click", () => zoom(0.5));
document.getElementById("zoom-out").addEventListener("click", () => zoom(2));
new ResizeObserver(() => view.parts.length && resize()).observe(figure);

if (DATA.graphs.length) {
  const isMeasured = DATA.graphs.some((g) => g.schedules.some((s) => s.measured));
  show({ rows: isMeasured ? ROWS : ["predicted"] });
} else {
  document.getElementById("sharding").textContent = "These plans have no steps: nothing was compiled that needs any.";
  document.querySelector("main").hidden = true;
}
