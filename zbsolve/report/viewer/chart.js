// The chart: three canvases (axis, boxes with an overlay, overview), one view of time, and the pointer.

const LETTERS = "ABCDEFGH";
const AXIS_HEIGHT = 30;
const MOST_PIXELS = 8e6; // a canvas of more is drawn coarser rather than slowly

class Chart {
  constructor(root, data, listener) {
    this.listener = listener;
    this.kinds = data.kinds;
    this.reasons = data.reasons;
    this.lanes = data.lanes.map((lane) => new Lane(lane, data.kinds));
    this.deviceCount = Math.max(...this.lanes.map((lane) => lane.deviceCount));
    this.flags = { bubbles: true, memory: this.lanes.some((lane) => lane.memory), critical: false };
    this.selection = null; // {lane, task} or {lane, bubble}
    this.hover = null;
    this.marker = null; // time of the stepped event
    this.showChain = false;
    this.view = new View(
      Math.min(...this.lanes.map((lane) => lane.first)), Math.max(...this.lanes.map((lane) => lane.last)));
    this.mostMemory = Math.max(1e-300, ...this.lanes.filter((lane) => lane.memory).flatMap(({ memory }) =>
      [...memory.peak, ...memory.cap.filter((cap) => cap !== null)]));
    this.axis = element("canvas", { class: "axis", "aria-hidden": "true" });
    this.base = element("canvas", { class: "base", "aria-hidden": "true" });
    this.overlay = element("canvas", {
      class: "overlay", tabindex: "0", role: "application",
      "aria-label": `Gantt chart of ${this.deviceCount} devices. Arrow keys pan and move between tasks, plus and minus zoom, N and P step through events, H lists all keys.`,
    });
    this.overview = element("canvas", { class: "overview", "aria-hidden": "true" });
    this.plot = element("div", { class: "plot" }, this.base, this.overlay);
    root.append(this.axis, this.plot, this.overview);
    this.root = root;
    this.drawTimes = [];
    this.listenToPointer();
    this.resize();
    this.observer = new ResizeObserver(() => { if (root.clientWidth !== this.width) this.resize(); });
    this.observer.observe(root);
  }

  // --- layout --------------------------------------------------------------------------------

  // Heights of lanes and bands: as much as the number of devices leaves, never too little to point at.
  layout() {
    const p = this.deviceCount;
    const several = this.lanes.length > 1;
    const room = (size, least) => Math.max(least, Math.round(several ? size * 0.8 : size));
    this.laneHeight = p <= 8 ? room(30, 20) : p <= 16 ? room(24, 16) : p <= 32 ? room(16, 14) : 12;
    this.bandHeight = !this.flags.memory ? 0 : p <= 8 ? 26 : p <= 16 ? 18 : 12;
    this.space = p <= 8 ? 10 : p <= 16 ? 7 : 5;
    this.rowHeight = this.laneHeight * this.lanes.length + this.bandHeight + this.space;
    this.height = Math.max(40, this.rowHeight * p);
    const narrow = this.width < 600;
    const named = this.laneHeight >= 20 && !narrow;
    this.gutter = (named ? 92 : narrow ? 34 : 58) + (several ? 14 : 0);
    this.view.place(this.gutter, this.width - this.gutter - 8);
  }

  laneTop(device, index) { return device * this.rowHeight + this.space / 2 + index * this.laneHeight; }
  bandTop(device) { return this.laneTop(device, this.lanes.length) + 1; }

  resize() {
    const width = this.root.clientWidth;
    if (!width) return;
    this.width = width;
    this.layout();
    this.setSize(this.axis, AXIS_HEIGHT);
    this.setSize(this.base, this.height);
    this.setSize(this.overlay, this.height);
    this.overviewHeight = Math.min(64, Math.max(24, this.deviceCount * this.lanes.length * 2));
    this.setSize(this.overview, this.overviewHeight + 8);
    this.plot.style.height = `${this.height}px`;
    this.redraw();
  }

  setSize(canvas, height) {
    const ratio = Math.min(window.devicePixelRatio || 1, Math.sqrt(MOST_PIXELS / (this.width * height)));
    canvas.width = Math.round(this.width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.width = `${this.width}px`;
    canvas.style.height = `${height}px`;
    canvas.getContext("2d").setTransform(canvas.width / this.width, 0, 0, canvas.height / height, 0, 0);
  }

  // Everything anew: after a change of size, theme or flags.
  redraw() {
    this.theme = readTheme(this.root);
    const context = this.base.getContext("2d");
    this.patterns = this.reasons.map(({ name }, k) => hatch(context, name, this.theme.reasons[k]));
    this.overviewPicture = null;
    this.requestDraw();
  }

  requestDraw() {
    if (this.requested) return;
    this.requested = true;
    requestAnimationFrame(() => {
      this.requested = false;
      const began = performance.now();
      this.drawBase();
      this.drawAxis();
      this.drawOverview();
      this.drawOverlay();
      this.drawTimes.push(performance.now() - began);
      if (this.drawTimes.length > 240) this.drawTimes.shift();
      this.listener.onview?.();
    });
  }

  requestOverlay() {
    if (this.overlayRequested || this.requested) return;
    this.overlayRequested = true;
    requestAnimationFrame(() => {
      this.overlayRequested = false;
      this.drawOverlay();
    });
  }

  // --- drawing -------------------------------------------------------------------------------

  drawBase() {
    const context = this.base.getContext("2d");
    const { theme, view } = this;
    context.clearRect(0, 0, this.width, this.height);
    const chosen = this.chosenTasks();
    for (let device = 0; device < this.deviceCount; device += 1) {
      context.fillStyle = theme.row;
      context.fillRect(view.left, this.laneTop(device, 0), view.width, this.rowHeight - this.space);
      this.drawName(context, device);
      this.lanes.forEach((lane, index) => {
        if (device >= lane.deviceCount) return;
        const top = this.laneTop(device, index);
        const height = this.laneHeight - (this.lanes.length > 1 ? 1 : 0);
        if (this.flags.bubbles) paintBubbles(context, lane, device, view, top, height, this.patterns);
        paintWaits(context, lane, device, view, top, height, theme.wait);
        const pick = chosen === null ? null : (task) => chosen[index].has(task);
        const range = paintBoxes(context, lane, device, view, top, height, pick);
        if (this.flags.critical) this.drawCritical(context, lane, range, top, height);
        paintLabels(context, lane, range, view, top, height, pick);
      });
      if (!this.flags.memory) continue;
      this.lanes.forEach((lane, index) => {
        if (!lane.memory || device >= lane.deviceCount) return;
        const place = [this.bandTop(device), this.bandHeight - 2];
        paintMemory(context, lane, device, view, ...place, this.mostMemory, theme, index === 0);
      });
    }
  }

  drawName(context, device) {
    const { theme } = this;
    const top = this.laneTop(device, 0);
    const wide = this.gutter >= 90;
    context.textAlign = "left";
    context.textBaseline = "middle";
    context.fillStyle = theme.text;
    context.font = `600 ${Math.min(13, this.laneHeight)}px ${FONT}`;
    context.fillText(wide ? `device ${device}` : `${device}`, 6, top + this.laneHeight / 2);
    const memory = this.lanes[0].memory;
    if (memory && this.flags.memory && this.bandHeight >= 12 && this.gutter >= 58 && device < this.lanes[0].deviceCount) {
      context.fillStyle = theme.muted;
      context.font = `11px ${FONT}`;
      const peak = formatNumber(memory.peak[device], 4);
      context.fillText(wide ? `peak ${peak}` : peak, wide ? 6 : 22, this.bandTop(device) + this.bandHeight / 2);
    }
    if (this.lanes.length > 1) {
      context.fillStyle = theme.muted;
      context.font = `600 ${Math.min(11, this.laneHeight - 2)}px ${FONT}`;
      context.textAlign = "right";
      this.lanes.forEach((_, index) => {
        context.fillText(LETTERS[index], this.gutter - 5, this.laneTop(device, index) + this.laneHeight / 2);
      });
    }
  }

  drawCritical(context, lane, [first, end], top, height) {
    const { view } = this;
    const thick = height >= 20 ? 4 : 3;
    context.fillStyle = this.theme.critical;
    for (let task = first; task < end; task += 1) {
      if (!lane.isCritical[task]) continue;
      const x = Math.max(view.left, view.x(lane.start[task]));
      const width = Math.min(view.left + view.width, view.x(lane.end[task])) - x;
      context.fillRect(x, top + height - thick, Math.max(1, width), thick);
    }
  }

  drawAxis() {
    const context = this.axis.getContext("2d");
    context.fillStyle = this.theme.page;
    context.fillRect(0, 0, this.width, AXIS_HEIGHT);
    const ticks = paintAxis(context, this.view, AXIS_HEIGHT, this.theme, this.lanes[0].timeUnit);
    const grid = this.base.getContext("2d");
    grid.save();
    grid.globalCompositeOperation = "destination-over";
    grid.fillStyle = this.theme.line;
    for (const time of ticks) grid.fillRect(Math.round(this.view.x(time)), 0, 1, this.height);
    grid.restore();
  }

  drawOverview() {
    const context = this.overview.getContext("2d");
    const whole = new View(this.view.first, this.view.last);
    whole.place(this.view.left, this.view.width);
    this.whole = whole;
    if (!this.overviewPicture) {
      this.overviewPicture = element("canvas");
      this.overviewPicture.width = this.overview.width;
      this.overviewPicture.height = this.overview.height;
      const pen = this.overviewPicture.getContext("2d");
      pen.setTransform(context.getTransform());
      pen.fillStyle = this.theme.row;
      pen.fillRect(whole.left, 4, whole.width, this.overviewHeight);
      const height = this.overviewHeight / (this.deviceCount * this.lanes.length);
      this.lanes.forEach((lane, index) => {
        for (let device = 0; device < lane.deviceCount; device += 1) {
          const top = 4 + (device * this.lanes.length + index) * height;
          paintColumns(pen, lane, device, whole, top, height);
        }
      });
    }
    context.save();
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, this.overview.width, this.overview.height);
    context.drawImage(this.overviewPicture, 0, 0);
    context.restore();
    const from = Math.max(whole.left, whole.x(this.view.from));
    const to = Math.min(whole.left + whole.width, whole.x(this.view.to));
    context.fillStyle = this.theme.page;
    context.globalAlpha = 0.6;
    context.fillRect(whole.left, 4, from - whole.left, this.overviewHeight);
    context.fillRect(to, 4, whole.left + whole.width - to, this.overviewHeight);
    context.globalAlpha = 1;
    context.strokeStyle = this.theme.accent;
    context.lineWidth = 2;
    context.strokeRect(from, 3, Math.max(3, to - from), this.overviewHeight + 2);
  }

  drawOverlay() {
    const context = this.overlay.getContext("2d");
    const { theme, view } = this;
    context.clearRect(0, 0, this.width, this.height);
    context.save();
    context.beginPath();
    context.rect(view.left, 0, view.width, this.height);
    context.clip();
    if (this.marker !== null) this.drawTime(context, this.marker, theme.accent, 2);
    if (this.pointerTime !== undefined && this.pointerTime !== null) this.drawTime(context, this.pointerTime, theme.muted, 1);
    const { selection } = this;
    if (selection) {
      const lane = this.lanes[selection.lane];
      context.strokeStyle = theme.text;
      context.lineWidth = 1.5;
      if (selection.task !== undefined) {
        if (this.showChain && lane.cause) this.drawLinks(context, selection.lane, lane.chain(selection.task).reverse());
        else for (const pair of lane.links(lane.microbatch[selection.task], lane.replica(selection.task))) this.drawLinks(context, selection.lane, pair);
        this.outline(context, selection.lane, selection.task, theme.text, 2.5);
      } else {
        const { bubble } = selection;
        this.outlineTime(context, selection.lane, bubble.device, bubble.start, bubble.end, theme.text, 2.5);
        if (bubble.waitsFor >= 0 && bubble.following >= 0) this.drawLinks(context, selection.lane, [bubble.waitsFor, bubble.following]);
      }
    } else if (this.flags.critical) {
      context.strokeStyle = theme.critical;
      context.lineWidth = 1.2;
      this.lanes.forEach((lane, index) => this.drawLinks(context, index, lane.critical, true));
    }
    if (this.hover?.task !== undefined) this.outline(context, this.hover.lane, this.hover.task, theme.accent, 2);
    else if (this.hover?.bubble) {
      const { bubble, lane } = this.hover;
      this.outlineTime(context, lane, bubble.device, bubble.start, bubble.end, theme.accent, 2);
    }
    context.restore();
  }

  drawTime(context, time, colour, width) {
    context.fillStyle = colour;
    context.fillRect(this.view.x(time) - width / 2, 0, width, this.height);
  }

  outline(context, index, task, colour, width) {
    const lane = this.lanes[index];
    this.outlineTime(context, index, lane.device(task), lane.start[task], lane.end[task], colour, width, lane.boxPlace(task));
  }

  outlineTime(context, index, device, start, end, colour, width, [from, share] = [0, 1]) {
    const x = this.view.x(start);
    const height = this.laneHeight - 1;
    context.strokeStyle = colour;
    context.lineWidth = width;
    context.strokeRect(x, this.laneTop(device, index) + from * height, Math.max(2, this.view.x(end) - x), share * height);
  }

  // Links between following tasks; between devices only, where `changes` says so.
  drawLinks(context, index, tasks, changes = false) {
    const lane = this.lanes[index];
    const at = (task, share) => this.laneTop(lane.device(task), index) + this.laneHeight * share;
    for (let k = 1; k < tasks.length; k += 1) {
      const [a, b] = [tasks[k - 1], tasks[k]];
      if (changes && lane.device(a) === lane.device(b)) continue;
      if (lane.end[a] < this.view.from && lane.start[b] < this.view.from) continue;
      if (lane.end[a] > this.view.to && lane.start[b] > this.view.to) continue;
      const share = lane.device(a) === lane.device(b) ? 0.88 : 0.5; // along a lane: below the labels
      paintLink(context, this.view.x(lane.end[a]), at(a, share), this.view.x(lane.start[b]), at(b, share));
    }
  }

  // Per lane the tasks that stay bright while something is selected; null while nothing is.
  chosenTasks() {
    const { selection } = this;
    if (selection?.task === undefined) return null;
    const lane = this.lanes[selection.lane];
    const chain = this.showChain && lane.cause ? lane.chain(selection.task) : null;
    return this.lanes.map((other, index) => {
      if (chain && index === selection.lane) return new Set(chain);
      return new Set(other.path(lane.microbatch[selection.task], lane.replica(selection.task)));
    });
  }

  // --- pointer -------------------------------------------------------------------------------

  // What lies under a point of the plot: a task, a bubble, or a device's memory.
  hit(x, y) {
    const { view } = this;
    if (x < view.left || x > view.left + view.width) return null;
    const device = Math.floor(y / this.rowHeight);
    if (device < 0 || device >= this.deviceCount) return null;
    const time = view.time(x);
    const index = Math.floor((y - this.laneTop(device, 0)) / this.laneHeight);
    if (index < 0) return null;
    if (index >= this.lanes.length) {
      return this.flags.memory && device < this.lanes[0].deviceCount ? { lane: 0, device, time, memory: true } : null;
    }
    const lane = this.lanes[index];
    if (device >= lane.deviceCount) return null;
    const reach = (2 * view.length) / view.width; // two pixels: small boxes stay clickable
    for (const moment of [time, time - reach, time + reach]) {
      const lower = y - this.laneTop(device, index) > this.laneHeight / 2;
      const task = lane.taskAt(device, moment, lower);
      if (task >= 0) return { lane: index, device, time, task };
    }
    const bubble = lane.bubbleAt(device, time);
    return bubble ? { lane: index, device, time, bubble } : null;
  }

  select(selection) {
    this.selection = selection;
    this.listener.onhover?.(null, null); // the details say it now
    this.requestDraw();
    this.listener.onselect?.(selection);
  }

  listenToPointer() {
    const { overlay } = this;
    const pointers = new Map();
    let moved = 0;
    const local = (event) => {
      const box = overlay.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    overlay.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      pointers.set(event.pointerId, local(event));
      if (pointers.size === 1) moved = 0;
      overlay.setPointerCapture(event.pointerId);
    });
    overlay.addEventListener("pointermove", (event) => {
      const [x, y] = local(event);
      const before = pointers.get(event.pointerId);
      if (!before) { this.point(x, y, event); return; }
      moved += Math.abs(x - before[0]) + Math.abs(y - before[1]);
      if (pointers.size === 2) {
        const [other] = [...pointers].filter(([id]) => id !== event.pointerId).map(([, place]) => place);
        const factor = Math.max(8, Math.abs(x - other[0])) / Math.max(8, Math.abs(before[0] - other[0]));
        this.view.zoom(factor, this.view.time((x + other[0]) / 2));
      } else if (moved > 4) {
        this.view.pan(((before[0] - x) / this.view.width) * this.view.length);
        overlay.classList.add("dragging");
      }
      pointers.set(event.pointerId, [x, y]);
      if (moved > 4) { this.unpoint(); this.requestDraw(); }
    });
    const release = (event) => {
      if (!pointers.delete(event.pointerId)) return;
      overlay.classList.remove("dragging");
      if (event.type === "pointerup" && moved <= 4) {
        const hit = this.hit(...local(event));
        this.select(hit && !hit.memory ? hit : null);
      }
    };
    overlay.addEventListener("pointerup", release);
    overlay.addEventListener("pointercancel", release);
    overlay.addEventListener("pointerleave", () => this.unpoint());
    overlay.addEventListener("dblclick", (event) => {
      this.view.zoom(2, this.view.time(local(event)[0]));
      this.requestDraw();
    });
    overlay.addEventListener("wheel", (event) => {
      const sideways = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
      if (event.ctrlKey || event.metaKey) this.view.zoom(1.0015 ** -event.deltaY, this.view.time(local(event)[0]));
      else if (Math.abs(sideways) > 0) this.view.pan((sideways / this.view.width) * this.view.length);
      else return; // an ordinary turn of the wheel scrolls the page
      event.preventDefault();
      this.unpoint();
      this.requestDraw();
    }, { passive: false });
    const brush = (event) => {
      if (event.type === "pointerdown") this.overview.setPointerCapture(event.pointerId);
      else if (!event.buttons) return;
      const x = event.clientX - this.overview.getBoundingClientRect().left;
      const half = this.view.length / 2;
      const middle = this.whole.time(x);
      this.view.show(middle - half, middle + half);
      this.requestDraw();
    };
    this.overview.addEventListener("pointerdown", brush);
    this.overview.addEventListener("pointermove", brush);
  }

  point(x, y, event) {
    this.hover = this.hit(x, y);
    this.pointerTime = x >= this.view.left ? this.view.time(x) : null;
    this.overlay.classList.toggle("pointing", Boolean(this.hover) && !this.hover.memory);
    this.requestOverlay();
    this.listener.onhover?.(this.hover, event);
  }

  unpoint() {
    if (this.hover === null && this.pointerTime == null) return;
    this.hover = this.pointerTime = null;
    this.requestOverlay();
    this.listener.onhover?.(null, null);
  }

  destroy() {
    this.observer.disconnect();
    this.root.replaceChildren();
  }
}
