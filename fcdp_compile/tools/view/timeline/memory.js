// The memory in use below the lanes, on the same axis, with the limit that a cache on the GPU keeps to.

const MEMORY = 132;
const MEMORY_HEAD = 26;

// Points [time, bytes, step] of a part; the row that is predicted where there is a choice.
function memoryOf(part) {
  return part.schedule[part.rows[0]].memory;
}

// The bytes at the top of the axis; found once for what is shown, as every point is measured by it.
function memoryMost(parts) {
  const limit = graph().memory_limit_bytes ?? 0;
  const most = Math.max(limit, ...parts.map((p) => memoryOf(p).reduce((a, m) => Math.max(a, m[1]), 0)));
  return most * 1.12 || 1;
}

function toY(bytes) {
  const bottom = view.height - 8;
  return bottom - (bytes / view.memoryMost) * (bottom - view.memoryTop - MEMORY_HEAD);
}

function hasMemory() {
  return view.parts.some((p) => memoryOf(p).length);
}

function memoryGutter() {
  const label = element("div", { class: "lane", "data-lane": "memory" }, element("b", {}, "Memory of the GPU"));
  label.style.top = `${view.memoryTop + 2}px`;
  const peak = graph().peak_bytes;
  label.append(element("span", {}, peak === null ? "in use while each step runs" : `predicted peak ${bytesText(peak)}`));
  if (!hasMemory()) return [label];
  const steps = [0, 0.5, 1].map((share) => {
    const bytes = roundBytes(view.memoryMost / 1.12) * share;
    const tick = element("div", { class: "tick" }, bytesText(bytes));
    tick.style.top = `${toY(bytes)}px`;
    return tick;
  });
  return [label, ...steps.slice(0, 2)];
}

// A figure with one digit, for an axis.
function roundBytes(bytes) {
  const unit = 2 ** (10 * Math.floor(Math.log2(Math.max(bytes, 1)) / 10));
  const power = 10 ** Math.floor(Math.log10(bytes / unit));
  return Math.max(1, Math.floor(bytes / unit / power)) * power * unit;
}

function drawMemory(layer) {
  const top = view.memoryTop;
  layer.append(drawn("line", { class: "rule", x1: 0, x2: view.width, y1: top, y2: top }));
  if (!hasMemory()) {
    const how = 'Nobody predicted memory: compile with options={"device_memory": "40GiB"}, or on a GPU.';
    layer.append(drawn("text", { class: "remark", id: "no-memory", x: 12, y: top + MEMORY / 2 }, how));
    return;
  }
  for (const part of view.parts) drawCurve(layer, part);
  const limit = graph().memory_limit_bytes;
  if (limit === null) return;
  const y = toY(limit);
  layer.append(drawn("line", { class: "limit", id: "limit", x1: 0, x2: view.width, y1: y, y2: y, "data-bytes": limit }));
  const name = `limit ${bytesText(limit)}`;
  layer.append(drawn("text", { class: "limit-name", x: view.width - 8, y: y - 5, "text-anchor": "end" }, name));
}

function drawCurve(layer, part) {
  const points = memoryOf(part);
  if (!points.length) return;
  const bottom = toY(0);
  const last = Math.min(toX(part.offset + part.length), view.width + 10);
  let path = "";
  points.forEach(([time, bytes], i) => {
    const next = i + 1 < points.length ? toX(part.offset + points[i + 1][0]) : last;
    const [left, right] = [Math.max(toX(part.offset + time), -10), Math.min(next, view.width + 10)];
    if (right < left) return;
    const y = toY(bytes).toFixed(1);
    path += `${path ? "L" : "M"}${left.toFixed(1)} ${y} L${right.toFixed(1)} ${y} `;
  });
  if (!path) return;
  const [from] = path.slice(1).split(" ");
  const to = path.trimEnd().split(" ").at(-2).replace("L", "");
  const area = `${path}L${to} ${bottom} L${from} ${bottom} z`;
  layer.append(drawn("path", { class: "area", d: area }));
  layer.append(drawn("path", { class: "curve", d: path, "data-part": part.index }));
}

// The bytes in use at a time, and the step that they are predicted for.
function memoryAt(time) {
  const part = view.parts.find((p) => time >= p.offset && time <= p.offset + p.length);
  const before = part ? memoryOf(part).filter((m) => part.offset + m[0] <= time) : [];
  return before.length ? before.at(-1)[1] : null;
}
