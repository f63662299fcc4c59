// The cards on top: for each direction one sentence, the reasons, and a picture of what moves from where to where.

const PLACES = {
  others: [4, 18, 112, 56, "Other nodes", "the slow network"],
  gpu: [270, 18, 104, 56, "This GPU", "one rank"],
  host: [524, 18, 112, 56, "Host memory", "of this node"],
  node: [226, 116, 192, 28, "Other GPUs of the node", ""],
};

function drawStories(parts) {
  const largest = Math.max(1, ...parts.flatMap((p) => Object.values(p.schedule.flows)));
  document.getElementById("stories").replaceChildren(...parts.map((part) => story(part, largest)));
}

function story(part, largest) {
  const { schedule, direction } = part;
  const variants = variantsOf(direction);
  const name = nameOf(schedule);
  const choice = element("div", { class: "buttons", role: "group", "aria-label": `Variant of ${direction}` });
  if (variants.length > 1) {
    for (const other of variants) {
      const [text, title] = nameOf(other);
      const choose = () => show({ variants: { ...state.variants, [direction]: other.variant } });
      const made = button(text, other === schedule, choose, title);
      made.dataset.variant = made.dataset.key = `${direction} ${other.variant}`;
      choice.append(made);
    }
  }
  return element(
    "article",
    { class: "card story", "data-direction": direction, "data-variant": schedule.variant },
    element(
      "div",
      { class: "top" },
      element("span", { class: "direction", title: name[1] }, NAMES[direction]),
      choice,
    ),
    element("h2", {}, schedule.headline),
    element("p", { class: "text" }, schedule.text),
    picture(schedule, largest),
    times(schedule),
  );
}

function times(schedule) {
  const line = element("p", { class: "times" });
  for (const [row, title] of [["predicted", "Predicted: "], ["measured", "; measured: "]]) {
    const found = schedule[row];
    if (!found) continue;
    const share = found.total_us ? Math.round((100 * found.still_us) / found.total_us) : 0;
    const still = element("b", {}, `${timeText(found.still_us)} (${share} %)`);
    line.append(title, element("b", {}, timeText(found.total_us)), ", compute stands still for ", still);
  }
  return line;
}

function picture(schedule, largest) {
  const flows = schedule.flows;
  const svg = drawn("svg", { class: "flow", viewBox: "0 0 640 146", role: "img", "aria-label": inWords(flows) });
  for (const [x, y, width, height, title, about] of Object.values(PLACES)) {
    const middle = x + width / 2;
    svg.append(drawn("rect", { class: "box", x, y, width, height, rx: 8 }));
    svg.append(drawn("text", { class: "place", x: middle, y: y + height / 2 + (about ? -2 : 5) }, title));
    if (about) svg.append(drawn("text", { class: "about", x: middle, y: y + height / 2 + 14 }, about));
  }
  const isBackward = schedule.direction === "backward";
  const kinds = new Set(schedule.kinds);
  const arrow = (flow, from, to, what, always = false) => {
    if (!always && !flows[flow]) return;
    const kind = DATA.kinds.find((k) => k.flow === flow && kinds.has(k.id)) ?? DATA.kinds.find((k) => k.flow === flow);
    svg.append(moving(kind.id, flow, flows[flow], largest, from, to, what));
  };
  arrow("weights_between", [120, isBackward ? 34 : 48], [266, isBackward ? 34 : 48], "weights", true);
  if (isBackward) arrow("gradients_between", [266, 64], [120, 64], "gradients", true);
  const lines = ["weights_from_host", "weights_to_host", "gradients_from_host", "gradients_to_host"];
  const used = lines.filter((flow) => flows[flow]);
  used.forEach((flow, i) => {
    const y = used.length === 1 ? 48 : 18 + (56 * (i + 0.65)) / used.length;
    const [from, to] = flow.endsWith("to_host") ? [378, 520] : [520, 378];
    arrow(flow, [from, y], [to, y], flow.startsWith("weights") ? "weights" : "gradients");
  });
  if (!used.length) arrow("weights_from_host", [378, 48], [520, 48], "", true);
  arrow("weights_within", [302, 112], [302, 78], "weights");
  arrow("gradients_within", [342, 78], [342, 112], "gradients");
  return svg;
}

// One arrow, as thick as it moves much, with the amount beside it; dashed and without a head where nothing moves.
function moving(kind, flow, bytes, largest, [x1, y1], [x2, y2], what) {
  const group = drawn("g", { "data-kind": kind, "data-flow": flow, "data-bytes": bytes });
  const isFlat = y1 === y2;
  const text = bytes ? `${what} ${bytesText(bytes)}` : what ? `no ${what}` : "nothing";
  const left = x1 < 322;
  const where = isFlat
    ? { x: (x1 + x2) / 2, y: y1 - 7 }
    : { x: left ? x1 - 9 : x1 + 9, y: (y1 + y2) / 2 + 4 };
  const beside = isFlat ? "" : left ? " before" : " beside";
  if (!bytes) {
    group.append(drawn("line", { class: "none", x1, y1, x2, y2 }));
    group.append(drawn("text", { class: `amount nothing${beside}`, ...where }, text));
    return group;
  }
  const width = 1.5 + 5 * Math.sqrt(bytes / largest);
  const [dx, dy] = [Math.sign(x2 - x1), Math.sign(y2 - y1)];
  const head = 5 + width;
  const [ex, ey] = [x2 - dx * head, y2 - dy * head];
  const half = head * 0.7;
  const points = [[x2, y2], [ex + dy * half, ey + dx * half], [ex - dy * half, ey - dx * half]];
  group.append(drawn("line", { class: "moves", x1, y1, x2: ex, y2: ey, "stroke-width": width }));
  group.append(drawn("polygon", { class: "head", points: points.map((p) => p.join()).join(" ") }));
  group.append(drawn("text", { class: `amount${beside}`, ...where, y: where.y - (isFlat ? width / 2 - 1 : 0) }, text));
  return group;
}

function inWords(flows) {
  const words = Object.entries(flows).map(([flow, bytes]) => `${flow.replaceAll("_", " ")}: ${bytesText(bytes)}`);
  return `Moved by one rank. ${words.join("; ")}`;
}
