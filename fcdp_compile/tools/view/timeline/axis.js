// The time axis: what part of it is in view, and how that changes.

const MOST_ZOOM = 1e5;
const STEPS = [1, 2, 5];

function total() {
  const last = view.parts.at(-1);
  return last ? last.offset + last.length : 1;
}

function toX(time) {
  return ((time - state.start) / (state.end - state.start)) * view.width;
}

function toTime(x) {
  return state.start + (x / view.width) * (state.end - state.start);
}

// Show a span, at most everything and never less than a hundred-thousandth of it.
function look(start, end) {
  const whole = total();
  const length = Math.min(whole, Math.max(end - start, whole / MOST_ZOOM));
  state.start = Math.min(Math.max(0, start), whole - length);
  state.end = state.start + length;
  redraw();
}

// Zoom so that one time stays where it is.
function zoom(factor, time = (state.start + state.end) / 2) {
  const length = (state.end - state.start) * factor;
  const share = (time - state.start) / (state.end - state.start);
  look(time - share * length, time - share * length + length);
}

function pan(time) {
  look(state.start + time, state.end + time);
}

function isWhole() {
  return state.end - state.start >= total() * (1 - 1e-9);
}

// Round times, about one in a hundred pixels.
function ticks() {
  const wanted = ((state.end - state.start) / view.width) * 100;
  const power = 10 ** Math.floor(Math.log10(wanted));
  const step = (STEPS.find((s) => s * power >= wanted) ?? 10) * power;
  const found = [];
  for (let i = Math.ceil(state.start / step); i * step <= state.end; i += 1) found.push(i * step);
  return found;
}

function crossing(flows) {
  const weights = flows.weights_between ? `${bytesText(flows.weights_between)} of weights` : "";
  const gradients = flows.gradients_between ? `${bytesText(flows.gradients_between)} of gradients` : "";
  const both = [weights, gradients].filter(Boolean).join(" and ");
  return `between nodes: ${both ? (weights ? both : `${gradients}, no weights`) : "nothing"}`;
}

function drawAxis(layer) {
  const top = HEAD - 8;
  const digits = 3 + Math.max(0, Math.ceil(Math.log10(state.end / (state.end - state.start))));
  for (const time of ticks()) {
    const x = toX(time);
    layer.append(drawn("line", { class: "grid", x1: x, x2: x, y1: HEAD, y2: view.height }));
    const anchor = x < 20 ? "start" : x > view.width - 24 ? "end" : "middle";
    layer.append(drawn("text", { class: "tick", x, y: top, "text-anchor": anchor }, timeText(time, digits)));
  }
  for (const part of view.parts) {
    const [left, right] = [toX(part.offset), toX(part.offset + part.length)];
    if (right < 0 || left > view.width) continue;
    if (part.index) layer.append(drawn("line", { class: "edge", x1: left, x2: left, y1: 0, y2: view.height }));
    const direction = drawn("tspan", { class: "direction" }, NAMES[part.direction]);
    const variant = drawn("tspan", { class: "direction" }, ` \u00b7 ${nameOf(part.schedule)[0]}`);
    const note = drawn("tspan", { dx: 10 }, crossing(part.schedule.flows));
    const text = drawn("text", { class: "part", x: Math.max(left, 0) + 8, y: 17 }, direction, variant, note);
    layer.append(text);
    // A part narrower than its text would write over the next one.
    const room = Math.min(right, view.width) - Math.max(left, 0) - 12;
    for (const last of [note, variant, direction]) {
      if (text.getComputedTextLength() > room) last.remove();
    }
  }
  if (!isWhole()) {
    const whole = total();
    const [x, width] = [(state.start / whole) * view.width, ((state.end - state.start) / whole) * view.width];
    layer.append(drawn("rect", { class: "scroll", x, width: Math.max(width, 6), y: HEAD - 4, height: 4, rx: 2 }));
  }
}
