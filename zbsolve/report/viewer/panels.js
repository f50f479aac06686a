// The words around the chart: figures of each lane, legend, devices, details of what is selected, tip.

const KEYS = [
  ["← →", "pan"], ["↑ ↓", "other device"], ["Shift ← →", "previous or next task of the device"],
  ["+ −", "zoom"], ["0", "show all"], ["N, P", "next or previous event"], ["W", "why then: the chain of causes"],
  ["C, B, M", "critical path, bubbles, memory"], ["/", "find a task"], ["T", "theme"], ["Esc", "clear"], ["H", "these keys"],
];

function laneCard(lane, index, several) {
  const { figures, timeUnit } = lane;
  const rows = [];
  const add = (name, value, mark = false) => rows.push(element("div", { class: mark ? "objective" : null },
    element("dt", {}, name), element("dd", {}, value)));
  if (lane.measured) {
    add("measured makespan", `${formatAmount(figures.makespan, timeUnit)} (median of ${figures.steps} steps)`);
  } else {
    add("makespan", formatAmount(figures.makespan, timeUnit), figures.objective === "makespan");
    add("span", formatAmount(figures.span, timeUnit), figures.objective === "span");
    add("bubble rate", `${formatShare(figures.bubbleRateMakespan)} by makespan, ${formatShare(figures.bubbleRateSpan)} by span`);
    if (figures.status) {
      add("lower bound", formatAmount(figures.lowerBound, timeUnit));
      add("gap", formatShare(figures.gap, 3));
    }
  }
  const title = several ? `${LETTERS[index]}: ${lane.name}` : lane.name;
  const badge = figures.status
    ? element("span", { class: `badge ${figures.status}` }, figures.status === "optimal" ? "proven optimal" : "feasible")
    : null;
  const proof = figures.proof
    ? element("details", { class: "proof" }, element("summary", {}, `Why no schedule is below the bound (${figures.provedBy})`), element("p", {}, figures.proof))
    : null;
  return element("section", { class: "card" }, element("h2", {}, title, badge), element("dl", {}, ...rows), proof);
}

function legend(chart) {
  const used = chart.kinds.filter((_, kind) => chart.lanes.some((lane) => lane.kind.includes(kind)));
  const items = used.map(({ name, colour, meaning }) => {
    const swatch = element("span", { class: "swatch", "aria-hidden": "true" });
    swatch.style.background = colour;
    return element("li", {}, swatch, element("b", {}, name), ` ${meaning}`);
  });
  const chunks = chart.lanes.some((lane) => lane.severalStages)
    ? element("li", {}, element("span", { class: "swatch chunk", "aria-hidden": "true" }), element("b", {}, "bar"), " every other chunk of a device") : null;
  const reasons = new Set(chart.lanes.flatMap((lane) => lane.bubbles.flat().map((bubble) => bubble.reason)));
  const bubbles = chart.reasons.map(({ name, meaning }, reason) => {
    if (!reasons.has(reason)) return null;
    const swatch = element("canvas", { class: "swatch", width: "26", height: "14", "aria-hidden": "true" });
    const pen = swatch.getContext("2d");
    pen.fillStyle = hatch(pen, name, chart.theme.reasons[reason]);
    pen.fillRect(0, 0, 26, 14);
    return element("li", {}, swatch, element("b", {}, name), ` ${meaning}`);
  });
  const waits = chart.lanes.some((lane) => lane.waits.length)
    ? element("li", {}, element("span", { class: "swatch waits", "aria-hidden": "true" }), element("b", {}, "wait"), " blocked in a receive")
    : null;
  return element("div", { class: "legend" },
    element("ul", { "aria-label": "Tasks" }, ...items, chunks, waits),
    bubbles.some(Boolean) ? element("ul", { "aria-label": "Why a device is idle" }, ...bubbles) : null);
}

// Per device: what it is busy with and why it idles; the columns "now" follow the stepped event.
function deviceTable(chart) {
  const [lane] = chart.lanes;
  const used = lane.devices
    ? chart.reasons.filter(({ name }) => lane.devices.some(({ idle }) => name in idle)) : [];
  const whole = lane.last - lane.first;
  const head = ["device", "busy", ...used.map(({ name }) => `idle: ${name}`)];
  if (lane.memory) head.push("peak memory", "cap");
  head.push("now", ...(lane.memory ? ["memory now"] : []));
  const now = [];
  const body = [];
  for (let device = 0; device < lane.deviceCount; device += 1) {
    const cells = [];
    if (lane.devices) {
      const { busy, idle } = lane.devices[device];
      cells.push(formatShare(busy / whole, 1), ...used.map(({ name }) => (name in idle ? formatNumber(idle[name], 5) : "–")));
    } else {
      let busy = 0;
      for (let task = lane.offsets[device]; task < lane.offsets[device + 1]; task += 1) busy += lane.end[task] - lane.start[task];
      cells.push(formatShare(busy / whole, 1));
    }
    if (lane.memory) {
      const cap = lane.memory.cap[device];
      cells.push(formatNumber(lane.memory.peak[device], 5), cap === null ? "none" : formatNumber(cap, 5));
    }
    now.push([element("td", {}, "–"), lane.memory ? element("td", {}, "–") : null]);
    body.push(element("tr", {}, element("th", { scope: "row" }, String(device)),
      ...cells.map((text) => element("td", {}, text)), ...now[device]));
  }
  const unit = lane.memory ? `${lane.timeUnit}, memory in ${lane.memoryUnit}` : lane.timeUnit;
  const table = element("table", {},
    element("caption", {}, `Where the step's time goes${chart.lanes.length > 1 ? ` (${LETTERS[0]}: ${lane.name})` : ""}; idle times in ${unit}`),
    element("thead", {}, element("tr", {}, ...head.map((text) => element("th", { scope: "col" }, text)))),
    element("tbody", {}, ...body));
  const update = (time) => now.forEach(([task, memory], device) => {
    const at = time === null ? -1 : lane.taskAt(device, time);
    task.textContent = time === null ? "–" : at < 0 ? "idle" : lane.fullName(at);
    if (memory) memory.textContent = time === null ? "–" : formatNumber(lane.memoryAt(device, time), 5);
  });
  return { node: element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Devices" }, table), update };
}

// What is known of a task, as pairs of name and value; a value with `task` leads there.
function taskFacts(chart, index, task) {
  const lane = chart.lanes[index];
  const unit = lane.timeUnit;
  const facts = [
    ["time", `${formatNumber(lane.start[task])} to ${formatAmount(lane.end[task], unit)} (takes ${formatAmount(lane.end[task] - lane.start[task], unit)})`],
  ];
  if (lane.slack) {
    const slack = lane.slack[task];
    facts.push(["slack", slack <= 1e-9 * lane.last ? "none: the cost rises if it ends later" : `may end ${formatAmount(slack, unit)} later`]);
    const cause = lane.cause[task];
    if (cause >= 0) {
      const place = lane.device(cause) === lane.device(task) ? "same device" : `device ${lane.device(cause)}`;
      facts.push(["waits for", `${lane.fullName(cause)} (${place}, ends at ${formatNumber(lane.end[cause])})`, cause]);
    } else facts.push(["waits for", "nothing"]);
  }
  if (lane.memory) facts.push(["memory while it runs", formatAmount(lane.memory.during[task], lane.memoryUnit)]);
  chart.lanes.forEach((other, k) => {
    if (k === index) return;
    const twin = other.path(lane.microbatch[task], lane.replica(task)).find((at) => other.kind[at] === lane.kind[task] && other.stage[at] === lane.stage[task]);
    if (twin === undefined) return;
    const ratio = (other.end[twin] - other.start[twin]) / (lane.end[task] - lane.start[task]);
    const times = !Number.isFinite(ratio) ? "" : Math.abs(ratio - 1) < 1e-9 ? ", as long" : `, ${formatNumber(ratio, 4)} times as long`;
    facts.push([`${LETTERS[k]}: ${other.name}`, `${formatNumber(other.start[twin])} to ${formatAmount(other.end[twin], unit)}${times}`]);
  });
  return facts;
}

function taskTitle(lane, task) {
  const stage = lane.stages[lane.stage[task]];
  const name = stage.name ? ` (${stage.name})` : "";
  return `${lane.fullName(task)}: ${lane.kinds[lane.kind[task]].meaning}, stage ${lane.stage[task]}${name}, micro-batch ${lane.microbatch[task]}, device ${stage.device}`;
}

function pathFact(lane, task) {
  const microbatch = lane.microbatch[task];
  const tasks = lane.path(microbatch, lane.replica(task));
  const first = lane.start[tasks[0]];
  const last = tasks.reduce((most, at) => Math.max(most, lane.end[at]), -Infinity);
  const busy = tasks.reduce((sum, at) => sum + lane.end[at] - lane.start[at], 0);
  return [`micro-batch ${microbatch}`, `${tasks.length} tasks from ${formatNumber(first)} to ${formatAmount(last, lane.timeUnit)}, of which ${formatAmount(busy, lane.timeUnit)} running`];
}
