// The data of the page, what is shown of it, and how numbers are written.

const DATA = JSON.parse(document.getElementById("data").textContent);
const KINDS = new Map(DATA.kinds.map((kind) => [kind.id, kind]));
const DIRECTIONS = ["forward", "backward", "inference"];
const NAMES = { forward: "Forward", backward: "Backward", inference: "Evaluation" };
const ROWS = ["predicted", "measured"];
const INNER = "model_collectives"; // the kind of bars that are no steps, but parts of compute steps

const VARIANTS = {
  "forward cold": ["changed weights", "after an optimizer step: changed weights are gathered"],
  "forward warm": ["nothing changed", "no weight changed since it was gathered: nothing is gathered between nodes"],
  "backward cold": ["one micro-batch", "gradients go to their owners"],
  "backward warm": ["one micro-batch", "gradients go to their owners"],
  "backward accumulate": ["gradients wait", "within no_sync: gradients wait for the next micro-batch"],
  "backward collect": ["last micro-batch", "gradients go to their owners with those that waited"],
  "inference cold": ["changed weights", "after an optimizer step: changed weights are gathered"],
  "inference warm": ["nothing changed", "no weight changed since it was gathered: nothing is gathered between nodes"],
};

// What is shown: a graph, a variant of each of its directions, rows of times, and of steps the one that is kept (chosen)
// and the one under the pointer (near).
const state = { graph: 0, variants: {}, rows: ["predicted"], start: 0, end: 1, chosen: null, near: null };

function graph() {
  return DATA.graphs[state.graph];
}

function variantsOf(direction) {
  return graph().schedules.filter((s) => s.direction === direction);
}

function nameOf(schedule) {
  return VARIANTS[`${schedule.direction} ${schedule.variant}`] ?? [schedule.variant, ""];
}

// One schedule of each direction, one behind the other on one axis. Where two rows of times are shown, a part is as long
// as the longer one, so that both rows of the next part start together.
function partsShown() {
  const parts = [];
  let offset = 0;
  for (const direction of DIRECTIONS) {
    const found = variantsOf(direction);
    if (!found.length) continue;
    const schedule = found.find((s) => s.variant === state.variants[direction]) ?? found[0];
    const rows = rowsOf(schedule);
    const length = Math.max(...rows.map((row) => schedule[row].total_us), 0.001);
    parts.push({ index: parts.length, schedule, direction, rows, offset, length });
    offset += length;
  }
  return parts;
}

function rowsOf(schedule) {
  const rows = state.rows.filter((row) => schedule[row]);
  return rows.length ? rows : ["predicted"];
}

// Every step that takes time, by lane and row, in the order of time. Freeing takes none; a transfer that moves nothing
// stays, so that one sees that it is there.
function barsOf(parts) {
  const bars = new Map();
  for (const lane of DATA.lanes) for (const row of ROWS) bars.set(`${lane.id} ${row}`, []);
  for (const part of parts) {
    for (const row of part.rows) {
      const { starts_us: starts, ends_us: ends } = part.schedule[row];
      part.schedule.kinds.forEach((kind, step) => {
        const lane = KINDS.get(kind).lane;
        if (ends[step] <= starts[step] && lane === "compute") return;
        const start = part.offset + starts[step];
        bars.get(`${lane} ${row}`).push({ part, row, lane, step, kind, start, end: part.offset + ends[step] });
      });
      for (const [step, start, end] of part.schedule[row].inner) {
        const lane = KINDS.get(INNER).lane;
        const [left, right] = [part.offset + start, part.offset + end];
        bars.get(`${lane} ${row}`).push({ part, row, lane, step, kind: INNER, start: left, end: right });
      }
    }
  }
  for (const found of bars.values()) found.sort((a, b) => a.start - b.start || a.step - b.step);
  return bars;
}

function timesOf(bar, row) {
  const times = bar.part.schedule[row];
  if (!times) return null;
  if (bar.kind === INNER) return times.inner.find(([step]) => step === bar.step)?.slice(1) ?? null;
  return [times.starts_us[bar.step], times.ends_us[bar.step]];
}

function bytesOf(bar) {
  const { bytes, inner_bytes: inner } = bar.part.schedule;
  return (bar.kind === INNER ? inner : bytes)[bar.step];
}

function bucketOf(part, step) {
  const id = part.schedule.buckets[step];
  return id === null ? null : { id, ...graph().buckets[id] };
}

function bytesText(bytes) {
  for (const [unit, name] of [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    const size = bytes / unit;
    if (size >= 1) return `${size.toFixed(size < 10 ? 2 : size < 100 ? 1 : 0)} ${name}`;
  }
  return `${bytes} B`;
}

function timeText(us, digits = 3) {
  if (us === 0) return "0";
  for (const [unit, name] of [[1e6, "s"], [1e3, "ms"]]) {
    if (us >= unit) return `${Number((us / unit).toPrecision(digits))} ${name}`;
  }
  return `${Number(us.toPrecision(digits))} \u00b5s`;
}

// Elements are made one by one and names only ever become text: none can become markup.
function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

const SVG = document.getElementById("plot").namespaceURI;

function drawn(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function button(text, pressed, action, title = "") {
  const made = element("button", { type: "button", "aria-pressed": pressed, title }, text);
  made.addEventListener("click", action);
  return made;
}
