// What there is to say of a step: shortly under the pointer, in full below the lanes.

const SHOWN = 6;

function heading(bar) {
  const kind = KINDS.get(bar.kind);
  return element(
    "div",
    { class: "heading", "data-kind": bar.kind },
    element("span", { class: "swatch" }),
    element("span", {}, bar.kind.replaceAll("_", " ")),
    element("span", { class: "about" }, kind.text),
  );
}

function facts(pairs) {
  const list = element("dl", { class: "facts" });
  for (const [name, value] of pairs) {
    if (value === null || value === "") continue;
    list.append(element("dt", {}, name), element("dd", {}, ...[value].flat()));
  }
  return list;
}

function names(bucket, shown = Infinity) {
  const lines = bucket.parameters.slice(0, shown).flatMap((name) => [element("code", {}, name), element("br")]);
  const left = bucket.parameters.length - shown;
  return left > 0 ? [...lines, `and ${left} more`] : lines.slice(0, -1);
}

function when(bar) {
  const [start, end] = timesOf(bar, bar.row);
  return `${bar.row} ${timeText(start, 4)} after the ${bar.part.direction} began, for ${timeText(end - start)}`;
}

function otherTimes(bar) {
  const other = bar.row === "predicted" ? "measured" : "predicted";
  const times = timesOf(bar, other);
  if (!times) return null;
  const [start, end] = times;
  return `${other} ${timeText(start, 4)}, for ${timeText(end - start)}`;
}

function amount(bar) {
  const bytes = bytesOf(bar);
  if (KINDS.get(bar.kind).lane === "compute") return null;
  return bytes ? `${bytesText(bytes)} (${bytes.toLocaleString("en-US")} bytes) a rank` : "nothing: it is where it is used";
}

function work(bar) {
  if (bar.kind === INNER) return null;
  const flops = bar.part.schedule.flops[bar.step];
  const inner = bar.part.schedule.inner_bytes[bar.step];
  const parts = [flops ? `${Number((flops / 1e9).toPrecision(3))} GFLOP` : null,
    inner ? `the model sends ${bytesText(inner)} a rank within the node` : null];
  return parts.filter((part) => part !== null).join("; ") || null;
}

function labelOf(part, step) {
  const schedule = part.schedule;
  const bucket = bucketOf(part, step);
  const what = schedule.kinds[step] === "compute" ? schedule.labels[step] : schedule.kinds[step].replaceAll("_", " ");
  return bucket ? `${what}, ${bucket.title}` : what;
}

// The steps that a bar's step waits for; of a part of a step, that step.
function waitsFor(bar, linked) {
  const waits = bar.kind === INNER ? [bar.step] : bar.part.schedule.waits[bar.step];
  if (!waits.length) return "nothing";
  const shown = waits.slice(0, SHOWN).map((index) => {
    const text = `${labelOf(bar.part, index)} (step ${index})`;
    const source = findBar(bar.part, index, bar.row);
    if (!linked || !source) return `${text} `;
    const made = element("button", { type: "button" }, text);
    made.addEventListener("click", () => {
      choose(source, true);
      figure.focus({ preventScroll: true }); // this button is gone: the arrow keys go on from the step
    });
    return made;
  });
  return waits.length > SHOWN ? [...shown, `and ${waits.length - SHOWN} more`] : shown;
}

function waitsName(bar) {
  return bar.kind === INNER ? "part of" : "waits for";
}

function aboutBucket(bar) {
  const bucket = bucketOfBar(bar);
  if (!bucket) return [];
  return [
    ["bucket", `${bucket.id} (${bucket.title})`],
    ["in full", `${bytesText(bucket.full_bytes)} of ${bucket.dtype}, ${bytesText(bucket.node_bytes)} a rank of each node`],
    ["trained", bucket.frozen ? "no, it is frozen" : "yes"],
    ["kept", { none: "nowhere", host: "in host memory", gpu: "on the GPU", "gpu-full": "on the GPU, in full" }[bucket.tier]],
    ["why", bucket.why],
  ];
}

function bucketOfBar(bar) {
  return bar.kind === INNER ? null : bucketOf(bar.part, bar.step);
}

function drawDetails() {
  const bar = state.chosen;
  const place = document.getElementById("details");
  if (!bar) {
    const text = "Point at a bar to see what it moves; click it, or use the arrow keys, to keep it here.";
    place.replaceChildren(element("p", { class: "empty" }, text));
    return;
  }
  const bucket = bucketOfBar(bar);
  const label = bar.part.schedule.labels[bar.step];
  const memory = bar.part.schedule.memory_bytes[bar.step];
  const mine = [
    ["step", `${bar.step} of ${bar.part.schedule.kinds.length} of the ${bar.part.direction}`],
    ["time", when(bar)],
    ["also", otherTimes(bar)],
    ["moves", amount(bar)],
    ["work", work(bar)],
    ["note", bar.kind === INNER ? null : label],
    [waitsName(bar), waitsFor(bar, true)],
    ["memory", memory === undefined ? null : `${bytesText(memory)} in use`],
  ];
  const halves = element("div", { class: "halves" }, facts(mine));
  if (bucket) halves.append(facts([...aboutBucket(bar), ["parameters", names(bucket)]]));
  place.replaceChildren(heading(bar), halves);
}

function drawTooltip(x, y) {
  const tooltip = document.getElementById("tooltip");
  const bar = state.near;
  tooltip.hidden = !bar;
  if (!bar) return;
  const bucket = bucketOfBar(bar);
  const kept = bucket ? aboutBucket(bar).filter(([name]) => ["bucket", "kept", "why"].includes(name)) : [];
  tooltip.replaceChildren(
    heading(bar),
    facts([
      ["parameters", bucket ? names(bucket, SHOWN) : null],
      ["moves", amount(bar)],
      ["time", when(bar)],
      ["also", otherTimes(bar)],
      ...kept,
      [waitsName(bar), waitsFor(bar, false)],
    ]),
  );
  const { width, height } = tooltip.getBoundingClientRect();
  const left = x + 18 + width > window.innerWidth ? Math.max(8, x - width - 18) : x + 18;
  const top = Math.min(y + 18, window.innerHeight - height - 8);
  tooltip.style.left = `${left}px`;
  tooltip.style.top = `${Math.max(8, top)}px`;
}
