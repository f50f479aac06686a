// Drawing on canvas: boxes, bubbles, labels, memory curves, axis. Pure functions of context, lane and place.

const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif';

// Colours of the page's theme, read from its style.
function readTheme(node) {
  const style = getComputedStyle(node);
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  return {
    text: colour("text"), muted: colour("muted"), line: colour("line"), page: colour("page"), row: colour("row"),
    memory: colour("memory"), memory2: colour("memory2"), cap: colour("cap"), critical: colour("critical"),
    accent: colour("accent"), wait: colour("wait"),
    reasons: ["fill", "input", "memory", "length", "order", "late", "drain"]
      .map((name) => colour(`reason-${name}`)),
  };
}

// Each reason has a pattern of its own besides its colour.
function hatch(context, reason, colour) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const pen = tile.getContext("2d");
  pen.strokeStyle = pen.fillStyle = colour;
  pen.lineWidth = 1.2;
  const line = (...points) => {
    pen.beginPath();
    for (let k = 0; k < points.length; k += 4) {
      pen.moveTo(points[k], points[k + 1]);
      pen.lineTo(points[k + 2], points[k + 3]);
    }
    pen.stroke();
  };
  const rising = [0, 8, 8, 0, -2, 2, 2, -2, 6, 10, 10, 6];
  const falling = [0, 0, 8, 8, -2, 6, 2, 10, 6, -2, 10, 2];
  if (reason === "fill") pen.fillRect(1, 1, 2, 2);
  else if (reason === "input") line(...rising);
  else if (reason === "memory") { line(...rising); line(...falling); }
  else if (reason === "length") line(...falling);
  else if (reason === "order") line(0, 4, 8, 4);
  else if (reason === "late") line(4, 0, 4, 8);
  else { pen.fillRect(1, 1, 2, 2); pen.fillRect(5, 5, 2, 2); }
  return context.createPattern(tile, "repeat");
}

// The boxes of one device's lane. `dimmed(task)` says which are pale.
function paintBoxes(context, lane, device, view, top, height, chosen) {
  const first = lane.firstEndingAfter(device, view.from);
  const stop = lane.offsets[device + 1];
  let end = first;
  while (end < stop && lane.start[end] < view.to) end += 1;
  const scale = view.width / view.length;
  const origin = view.left - view.from * scale;
  const gap = height >= 14 ? 1 : 0;
  const right = view.left + view.width;
  if (end - first > 3 * view.width) {
    paintColumns(context, lane, device, view, top, height);
  } else {
    for (let kind = 0; kind < lane.kinds.length; kind += 1) {
      context.fillStyle = lane.kinds[kind].colour;
      for (let task = first; task < end; task += 1) {
        if (lane.kind[task] !== kind) continue;
        const x = Math.max(view.left, origin + lane.start[task] * scale);
        const width = Math.min(right, origin + lane.end[task] * scale) - x;
        if (chosen !== null) context.globalAlpha = chosen(task) ? 1 : 0.22;
        const drawn = width > 3 ? width - gap : Math.max(width, 0.6);
        const [from, share] = lane.boxPlace(task);
        context.fillRect(x, top + from * height, drawn, share * height);
        if (lane.severalStages && lane.chunk[lane.stage[task]] % 2) { // later chunks carry a bar
          context.fillStyle = "rgb(0 0 0 / 55%)";
          context.fillRect(x, top + from * height, drawn, Math.max(2, height / 10));
          context.fillStyle = lane.kinds[kind].colour;
        }
      }
    }
    context.globalAlpha = 1;
  }
  return [first, end];
}

// More boxes than pixels: what runs at the middle of each pixel.
function paintColumns(context, lane, device, view, top, height) {
  let run = 0;
  let before = -1;
  const flush = (x) => {
    if (before >= 0) {
      context.fillStyle = lane.kinds[before].colour;
      context.fillRect(run, top, x - run, height);
    }
  };
  for (let x = view.left; x <= view.left + view.width; x += 1) {
    const task = lane.taskAt(device, view.time(x + 0.5));
    const kind = task < 0 ? -1 : lane.kind[task];
    if (kind !== before) { flush(x); run = x; before = kind; }
  }
  flush(view.left + view.width);
}

function paired(lane, first, end) {
  for (let task = first; task < end; task += 1) if (lane.half[task]) return true;
  return false;
}

// Labels where they fit: full, else the micro-batch alone, else none.
function paintLabels(context, lane, [first, end], view, top, height, chosen) {
  const size = Math.min(12, height - 4, paired(lane, first, end) ? height / 2 - 2 : 12);
  if (size < 7) return;
  context.font = `${size}px ${FONT}`;
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.fillStyle = "#000";
  const glyph = 0.62 * size;
  const fonts = [context.font, `700 ${context.font}`]; // chunks of a device in turn
  const scale = view.width / view.length;
  for (let task = first; task < end; task += 1) {
    const width = (lane.end[task] - lane.start[task]) * scale;
    if (width < 1.6 * glyph) continue;
    const full = lane.label(task);
    const room = (text) => (text.length + 0.6) * glyph <= width;
    const text = room(full) ? full : String(lane.microbatch[task]);
    if (text !== full && !room(text)) continue;
    if (chosen !== null && !chosen(task)) continue;
    const from = Math.max(view.from, lane.start[task]);
    const to = Math.min(view.to, lane.end[task]);
    if ((to - from) * scale < (text.length + 0.3) * glyph) continue;
    const font = fonts[lane.chunk[lane.stage[task]] % 2];
    if (context.font !== font) context.font = font;
    const [place, share] = lane.boxPlace(task);
    context.fillText(text, view.x((from + to) / 2), top + height * (place + share / 2) + 0.5);
  }
}

function paintBubbles(context, lane, device, view, top, height, patterns) {
  for (const bubble of lane.bubbles[device]) {
    if (bubble.end <= view.from || bubble.start >= view.to) continue;
    const x = Math.max(view.left, view.x(bubble.start));
    const width = Math.min(view.left + view.width, view.x(bubble.end)) - x;
    if (width < 0.5) continue;
    context.fillStyle = patterns[bubble.reason];
    context.fillRect(x, top, width, height);
  }
}

function paintWaits(context, lane, device, view, top, height, colour) {
  context.fillStyle = colour;
  for (const [at, from, to] of lane.waits) {
    if (at !== device || to <= view.from || from >= view.to) continue;
    const x = Math.max(view.left, view.x(from));
    context.fillRect(x, top + height * 0.35, Math.min(view.left + view.width, view.x(to)) - x, height * 0.3);
  }
}

// In-flight memory as a stepped curve over `most`, filled or as a line, with the cap dashed.
function paintMemory(context, lane, device, view, top, height, most, theme, filled) {
  const y = (level) => top + height - (height - 2) * (level / most);
  const stop = lane.offsets[device + 1];
  let task = lane.firstEndingAfter(device, view.from);
  let level = task > lane.offsets[device] ? lane.memory.after[task - 1] : lane.memory.static[device];
  const right = view.left + view.width;
  context.beginPath();
  context.moveTo(view.left, y(level));
  for (; task < stop && lane.start[task] < view.to; task += 1) {
    const from = Math.max(view.left, view.x(lane.start[task]));
    const to = Math.min(right, view.x(lane.end[task]));
    context.lineTo(from, y(level));
    context.lineTo(from, y(lane.memory.during[task]));
    context.lineTo(to, y(lane.memory.during[task]));
    level = lane.memory.after[task];
    context.lineTo(to, y(level));
  }
  context.lineTo(right, y(level));
  if (filled) {
    context.lineTo(right, top + height);
    context.lineTo(view.left, top + height);
    context.fillStyle = theme.memory;
    context.fill();
  } else {
    context.strokeStyle = theme.memory2;
    context.lineWidth = 1.5;
    context.stroke();
  }
  const cap = lane.memory.cap[device];
  if (cap !== null && filled) {
    context.save();
    context.setLineDash([5, 4]);
    context.strokeStyle = theme.cap;
    context.lineWidth = 1.2;
    context.beginPath();
    context.moveTo(view.left, y(cap));
    context.lineTo(right, y(cap));
    context.stroke();
    context.restore();
  }
}

// A line from the end of one task to the start of the next, for paths that change device.
function paintLink(context, x1, y1, x2, y2) {
  const bend = Math.max(6, Math.abs(x2 - x1) / 2);
  context.beginPath();
  context.moveTo(x1, y1);
  context.bezierCurveTo(x1 + bend, y1, x2 - bend, y2, x2, y2);
  context.stroke();
}

function paintAxis(context, view, height, theme, unit) {
  const { ticks, decimals } = view.ticks();
  context.font = `12px ${FONT}`;
  context.textBaseline = "middle";
  context.textAlign = "center";
  context.strokeStyle = theme.line;
  context.lineWidth = 1;
  let free = view.left - 12;
  for (const time of ticks) {
    const x = view.x(time);
    const text = time.toLocaleString("en-US", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
    context.beginPath();
    context.moveTo(x, height - 6);
    context.lineTo(x, height);
    context.stroke();
    const half = context.measureText(text).width / 2;
    if (x - half < free || x + half > view.left + view.width) continue;
    context.fillStyle = theme.text;
    context.fillText(text, x, height / 2 - 3);
    free = x + half + 8;
  }
  context.textAlign = "left";
  context.fillStyle = theme.muted;
  context.fillText(unit, 6, height / 2 - 3);
  return ticks;
}
