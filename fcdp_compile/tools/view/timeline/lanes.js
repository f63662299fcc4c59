// The lanes: a bar for each step in view. What does not fit a pixel of its own is drawn once.

const HEAD = 46;
const LANE = 42;
const BESIDE = 29; // a lane's row where two are shown
const GAP = 6;

// Where everything is, for the parts and rows that are shown.
function layOut(parts) {
  const rows = ROWS.filter((row) => parts.some((p) => p.rows.includes(row)));
  const laneHeight = rows.length > 1 ? 2 * BESIDE + GAP : LANE;
  const lanes = DATA.lanes.map((lane, i) => ({ ...lane, top: HEAD + i * laneHeight, height: laneHeight }));
  const memoryTop = HEAD + lanes.length * laneHeight;
  const height = memoryTop + MEMORY;
  return { parts, rows, lanes, bars: barsOf(parts), memoryTop, memoryMost: memoryMost(parts), height };
}

function barBox(lane, row) {
  const two = view.rows.length > 1;
  const height = two ? BESIDE - GAP : LANE - 2 * GAP - 4;
  return { y: lane.top + GAP + 2 + (two && row === "measured" ? BESIDE - 2 : 0), height };
}

function drawGutter() {
  const children = [];
  for (const lane of view.lanes) {
    const label = element("div", { class: "lane", "data-lane": lane.id }, element("b", {}, lane.name));
    label.append(element("span", {}, lane.text));
    label.style.top = `${lane.top}px`;
    label.style.height = `${lane.height}px`;
    if (view.rows.length > 1) label.style.right = "74px";
    children.push(label);
    if (view.rows.length < 2) continue;
    for (const row of view.rows) {
      if (lane.id === KINDS.get(INNER).lane && row === "measured") continue; // nobody records parts of steps
      const name = element("div", { class: "row" }, row);
      const box = barBox(lane, row);
      name.style.top = `${box.y + box.height / 2 - 7}px`;
      children.push(name);
    }
  }
  document.getElementById("gutter").replaceChildren(...children, ...memoryGutter());
}

function drawGround(layer) {
  view.lanes.forEach((lane, i) => {
    if (i % 2 === 0) {
      layer.append(drawn("rect", { class: "band", x: 0, y: lane.top, width: view.width, height: lane.height }));
    }
    layer.append(drawn("line", { class: "rule", x1: 0, x2: view.width, y1: lane.top, y2: lane.top }));
  });
}

function drawBars(layer, captions) {
  let count = 0;
  for (const lane of view.lanes) {
    for (const row of view.rows) {
      const box = barBox(lane, row);
      for (const bar of visible(view.bars.get(`${lane.id} ${row}`))) {
        layer.append(barNode(bar, box, captions));
        count += 1;
      }
    }
  }
  return count;
}

function barNode(bar, box, captions) {
  const left = Math.max(toX(bar.start), -4);
  const right = Math.min(toX(bar.end), view.width + 4);
  const width = Math.max(right - left - 0.6, 1);
  const node = drawn("rect", {
    class: barClass(bar),
    x: left,
    y: box.y,
    width,
    height: box.height,
    rx: Math.min(3, width / 3),
    "data-kind": bar.kind,
    "data-row": bar.row,
    "data-part": bar.part.index,
    "data-step": bar.step,
  });
  const name = width > 22 ? captionOf(bar, Math.floor((width - 10) / 6.4)) : "";
  if (name) {
    const y = box.y + box.height / 2 + 4;
    captions.append(drawn("text", { class: "caption", x: left + 5, y }, name));
  }
  return node;
}

function captionOf(bar, letters) {
  if (bar.kind === INNER) {
    const text = bytesText(bytesOf(bar));
    return text.length <= letters ? text : "";
  }
  const bucket = bar.kind === "wait" ? null : bucketOf(bar.part, bar.step);
  return bucket ? nameWithin(bucket, letters) : "";
}

// As much of the end of a bucket's name as fits and tells it from other names; else its number.
function nameWithin(bucket, letters) {
  const parts = bucket.short.split(".");
  const names = Object.values(graph().buckets).map((other) => other.short);
  for (let i = 0; i < parts.length; i += 1) {
    const end = parts.slice(i).join(".");
    const isOthers = names.some((name) => name !== bucket.short && `.${name}`.endsWith(`.${end}`));
    if (end.length <= letters && !isOthers) return end;
  }
  const number = `#${bucket.id}`;
  return number.length <= letters ? number : "";
}

function barClass(bar) {
  if (isSame(bar, state.chosen)) return "bar chosen";
  return isSame(bar, state.near) ? "bar near" : "bar";
}

function isSame(bar, other) {
  if (other === null || bar.part.index !== other.part.index) return false;
  return bar.step === other.step && bar.row === other.row && bar.lane === other.lane;
}

// Bars of one lane that are in view; of several that share a pixel and look alike, the first. So there are never more
// than pixels times kinds, however many steps a plan has.
function visible(bars) {
  const found = [];
  const pixels = new Map(); // the last one that a bar of each kind takes
  for (let i = firstEndingAfter(bars, state.start); i < bars.length && bars[i].start <= state.end; i += 1) {
    const right = toX(bars[i].end);
    if (right < 0) continue;
    const pixel = pixels.get(bars[i].kind) ?? -Infinity;
    if (right < pixel + 1 && !isSame(bars[i], state.chosen)) continue;
    found.push(bars[i]);
    pixels.set(bars[i].kind, Math.max(pixel, Math.floor(right)));
  }
  return found;
}

// Lanes take their steps one by one, so ends are in order, too; measured ones may overlap a little.
function firstEndingAfter(bars, time) {
  let [low, high] = [0, bars.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (bars[middle].end < time) low = middle + 1;
    else high = middle;
  }
  return Math.max(0, low - 1);
}

// The step at a point: the one there, or the nearest within a few pixels.
function barAt(x, y) {
  const lane = view.lanes.find((l) => y >= l.top && y < l.top + l.height);
  if (!lane) return null;
  const middle = (row) => barBox(lane, row).y + barBox(lane, row).height / 2;
  const row = view.rows.reduce((a, b) => (Math.abs(middle(b) - y) < Math.abs(middle(a) - y) ? b : a));
  const bars = view.bars.get(`${lane.id} ${row}`);
  const time = toTime(x);
  const slack = toTime(3) - toTime(0);
  let best = null;
  let distance = slack;
  for (let i = firstEndingAfter(bars, time - slack); i < bars.length && bars[i].start <= time + slack; i += 1) {
    const away = Math.max(bars[i].start - time, time - bars[i].end, 0);
    if (away < distance || (away === distance && best === null)) [best, distance] = [bars[i], away];
  }
  return best;
}

// From the end of each step that this one waits for to where it begins, or goes on.
function drawLinks(layer) {
  const bar = state.near ?? state.chosen;
  if (!bar || bar.kind === INNER) return;
  for (const index of bar.part.schedule.waits[bar.step]) {
    const source = findBar(bar.part, index, bar.row);
    if (!source) continue;
    const [x1, x2] = [toX(source.end), Math.min(Math.max(toX(bar.start), toX(source.end)), toX(bar.end))];
    const [y1, y2] = [middleOf(source), middleOf(bar)];
    const bend = Math.max(18, Math.abs(x2 - x1) / 2);
    const path = source.lane === bar.lane ? `M${x1} ${y1} L${x2} ${y2}` : `M${x1} ${y1} C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}`;
    layer.append(drawn("path", { class: "link", d: path }));
  }
}

function findBar(part, step, row) {
  const lane = KINDS.get(part.schedule.kinds[step]).lane;
  const bars = view.bars.get(`${lane} ${row}`);
  return bars.find((b) => b.part.index === part.index && b.step === step) ?? null;
}

function middleOf(bar) {
  const box = barBox(view.lanes.find((l) => l.id === bar.lane), bar.row);
  return box.y + box.height / 2;
}
