// The page: chart, tools, keys and details put together. `zbsolveViewer.mount` is its only door.

const THEMES = ["auto", "light", "dark"];

function storedTheme() {
  try { return localStorage.getItem("zbsolve-theme") ?? "auto"; } catch { return "auto"; } // a file may store nothing
}

function applyTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  try { localStorage.setItem("zbsolve-theme", theme); } catch { /* the choice lasts as long as the page */ }
}

class Viewer {
  constructor(root, data) {
    this.data = data;
    this.root = root;
    root.replaceChildren();
    root.classList.add("viewer");
    this.tip = element("div", { class: "tip", hidden: true });
    this.details = element("section", { class: "details", "aria-live": "polite", "aria-label": "Details" });
    const frame = element("div", { class: "frame" });
    this.chart = null;
    this.tools = this.makeTools();
    const head = element("header", { class: "head" }, element("h1", {}, data.title), this.themeButton());
    this.cards = element("div", { class: "cards" });
    this.below = element("div", { class: "below" });
    root.append(head, this.cards, this.tools, frame, this.details, this.below, this.tip);
    this.chart = new Chart(frame, data, {
      onselect: () => this.describe(),
      onhover: (hit, event) => this.showTip(hit, event),
    });
    const { chart } = this;
    this.cards.append(...chart.lanes.map((lane, index) => laneCard(lane, index, chart.lanes.length > 1)));
    this.toggles.memory.hidden = !chart.flags.memory;
    this.toggles.critical.hidden = !chart.lanes.some((lane) => lane.critical.length);
    this.toggles.bubbles.hidden = !chart.lanes.some((lane) => lane.bubbles.some((list) => list.length));
    this.table = deviceTable(chart);
    this.drawLegend();
    this.event = -1;
    this.onKey = (event) => this.key(event);
    document.addEventListener("keydown", this.onKey);
    this.media = matchMedia("(prefers-color-scheme: dark)");
    this.onMedia = () => this.rethemed();
    this.media.addEventListener("change", this.onMedia);
    this.describe();
  }

  destroy() {
    this.media.removeEventListener("change", this.onMedia);
    document.removeEventListener("keydown", this.onKey);
    this.chart.destroy();
    this.root.replaceChildren();
  }

  // --- parts ---------------------------------------------------------------------------------

  makeTools() {
    const button = (text, label, action) => element("button", { type: "button", "aria-label": label, title: label, onclick: action }, text);
    const flag = (name, text, on) => {
      const button = element("button", {
        type: "button", "aria-pressed": String(on), onclick: () => this.toggle(name),
      }, text);
      this.toggles = { ...this.toggles, [name]: button };
      return button;
    };
    this.find = element("input", {
      type: "search", placeholder: "F2.3", "aria-label": "Find a task, such as F2.3 or mb 3", size: "9",
      onchange: () => this.search(),
    });
    this.keysPanel = element("div", { class: "keys", hidden: true },
      element("dl", {}, ...KEYS.flatMap(([keys, meaning]) => [element("dt", {}, keys), element("dd", {}, meaning)])));
    return element("div", { class: "tools" },
      element("div", { class: "bar", role: "toolbar", "aria-label": "Chart" },
        button("−", "Zoom out", () => this.zoom(1 / 1.6)), button("+", "Zoom in", () => this.zoom(1.6)),
        button("All", "Show the whole step", () => this.fit()),
        button("◂ event", "Previous event", () => this.step(-1)), button("event ▸", "Next event", () => this.step(1)),
        flag("bubbles", "Bubbles", true), flag("memory", "Memory", true), flag("critical", "Critical path", false),
        element("label", { class: "find" }, "Find ", this.find),
        button("Keys", "List the keys", () => this.toggleKeys())),
      this.keysPanel);
  }

  themeButton() {
    const button = element("button", { type: "button", onclick: () => this.nextTheme() });
    this.themeName = button;
    button.textContent = `Theme: ${storedTheme()}`;
    return button;
  }

  drawLegend() {
    this.below.replaceChildren(legend(this.chart), this.table.node);
  }

  rethemed() {
    this.chart.redraw();
    this.drawLegend();
  }

  nextTheme() {
    const theme = THEMES[(THEMES.indexOf(storedTheme()) + 1) % THEMES.length];
    applyTheme(theme);
    this.themeName.textContent = `Theme: ${theme}`;
    this.rethemed();
  }

  // --- actions -------------------------------------------------------------------------------

  zoom(factor) {
    const { selection, view } = this.chart;
    const lane = selection ? this.chart.lanes[selection.lane] : null;
    const time = selection?.task !== undefined ? lane.start[selection.task] : selection?.bubble?.start ?? this.chart.marker;
    const visible = time !== null && time !== undefined && time >= view.from && time <= view.to;
    view.zoom(factor, visible ? time : undefined);
    this.chart.requestDraw();
  }

  fit() {
    this.chart.view.fit();
    this.chart.requestDraw();
  }

  toggle(name) {
    const { flags } = this.chart;
    flags[name] = !flags[name];
    this.toggles[name].setAttribute("aria-pressed", String(flags[name]));
    this.chart.resize();
  }

  toggleKeys() { this.keysPanel.hidden = !this.keysPanel.hidden; }

  select(index, task) {
    const lane = this.chart.lanes[index];
    this.chart.view.reveal(lane.start[task], lane.end[task]);
    this.chart.select({ lane: index, task, device: lane.device(task) });
    this.scrollTo(lane.device(task));
  }

  // Devices far down come into sight.
  scrollTo(device) {
    const top = this.chart.overlay.getBoundingClientRect().top + this.chart.laneTop(device, 0);
    const bottom = top + this.chart.rowHeight;
    const floor = window.innerHeight - this.details.offsetHeight;
    if (top < 40) window.scrollBy({ top: top - 60 });
    else if (bottom > floor) window.scrollBy({ top: bottom - floor + 20 });
  }

  step(direction) {
    const lane = this.chart.lanes[0];
    if (!lane.size) return;
    this.event = Math.min(lane.size - 1, Math.max(0, this.event + direction));
    const task = lane.events[this.event];
    this.chart.marker = lane.start[task];
    this.select(0, task);
    this.table.update(this.chart.marker);
  }

  search() {
    const index = this.chart.lanes.findIndex((lane) => lane.search(this.find.value) >= 0);
    if (index >= 0) this.select(index, this.chart.lanes[index].search(this.find.value));
    else if (this.find.value.trim()) this.details.replaceChildren(element("p", {}, `No task is called ${this.find.value}: write F2.3 (stage 2, micro-batch 3) or mb 3.`));
  }

  clear() {
    this.chart.showChain = false;
    this.chart.marker = null;
    this.event = -1;
    this.table.update(null);
    this.chart.select(null);
  }

  key(event) {
    if (event.target === this.find) {
      if (event.key === "Escape") this.chart.overlay.focus();
      return;
    }
    if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
    const onChart = event.target === this.chart.overlay;
    const { view } = this.chart;
    const keys = {
      "+": () => this.zoom(1.6), "=": () => this.zoom(1.6), "-": () => this.zoom(1 / 1.6), 0: () => this.fit(),
      n: () => this.step(1), p: () => this.step(-1), w: () => this.why(), c: () => this.toggle("critical"),
      b: () => this.toggle("bubbles"), m: () => this.toggle("memory"), t: () => this.nextTheme(), h: () => this.toggleKeys(),
      "/": () => this.find.focus(), Escape: () => this.clear(),
    };
    if (onChart) {
      Object.assign(keys, {
        ArrowLeft: () => (event.shiftKey ? this.neighbour(-1) : this.pan(-view.length / 8)),
        ArrowRight: () => (event.shiftKey ? this.neighbour(1) : this.pan(view.length / 8)),
        ArrowUp: () => this.otherDevice(-1), ArrowDown: () => this.otherDevice(1),
        Home: () => this.pan(-Infinity), End: () => this.pan(Infinity),
      });
    }
    const action = keys[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!action) return;
    event.preventDefault();
    action();
  }

  pan(time) {
    const { view } = this.chart;
    view.pan(Math.max(view.first - view.to, Math.min(view.last - view.from, time)));
    this.chart.requestDraw();
  }

  // The task before or after the selected one on its device.
  neighbour(direction) {
    const { selection } = this.chart;
    const index = selection?.lane ?? 0;
    const lane = this.chart.lanes[index];
    const device = selection?.device ?? 0;
    const task = selection?.task === undefined
      ? lane.firstEndingAfter(device, selection?.bubble?.start ?? -Infinity) - (direction < 0 ? 1 : 0)
      : selection.task + direction;
    if (task >= lane.offsets[device] && task < lane.offsets[device + 1]) this.select(index, task);
  }

  // The task at the same time on the device above or below.
  otherDevice(direction) {
    const { selection } = this.chart;
    const index = selection?.lane ?? 0;
    const lane = this.chart.lanes[index];
    const time = selection?.task !== undefined ? lane.start[selection.task] : selection?.bubble?.start ?? lane.first;
    const device = selection ? Math.min(lane.deviceCount - 1, Math.max(0, selection.device + direction)) : 0;
    const task = Math.min(lane.firstEndingAfter(device, time), lane.offsets[device + 1] - 1);
    if (task >= lane.offsets[device]) this.select(index, task);
  }

  why() {
    if (this.chart.selection?.task === undefined) return;
    this.chart.showChain = !this.chart.showChain;
    this.chart.requestDraw();
    this.describe();
  }

  // --- words ---------------------------------------------------------------------------------

  describe() {
    const { selection } = this.chart;
    if (!selection) {
      this.chart.showChain = false;
      this.details.replaceChildren(element("p", {}, "Select a box to see its micro-batch's whole path, an idle stretch to see why the device waits."));
      return;
    }
    const lane = this.chart.lanes[selection.lane];
    if (selection.bubble) { this.describeBubble(lane, selection); return; }
    const { task } = selection;
    const facts = [...taskFacts(this.chart, selection.lane, task), pathFact(lane, task)];
    const goTo = (target) => element("button", { type: "button", onclick: () => this.select(selection.lane, target) }, "go there");
    const children = [element("h2", {}, taskTitle(lane, task)),
      element("dl", {}, ...facts.map(([name, value, target]) => element("div", {},
        element("dt", {}, name), element("dd", {}, value, target === undefined ? null : " ", target === undefined ? null : goTo(target)))))];
    if (lane.cause) {
      const chain = lane.chain(task);
      children.push(element("p", {}, element("button", {
        type: "button", "aria-pressed": String(this.chart.showChain), onclick: () => this.why(),
      }, "Why then?"), this.chart.showChain
        ? ` Each waited for the one before it: ${chainText(lane, chain)}`
        : ` shows the ${chain.length} tasks that led to this start`));
    }
    this.details.replaceChildren(...children);
  }

  describeBubble(lane, { lane: index, bubble }) {
    const { name, meaning } = this.chart.reasons[bubble.reason];
    const children = [
      element("h2", {}, `Bubble of device ${bubble.device}: ${formatAmount(bubble.end - bubble.start, lane.timeUnit)}, from ${formatNumber(bubble.start)} to ${formatNumber(bubble.end)}`),
      element("p", {}, element("b", {}, name), `: ${meaning}`), element("p", {}, `${bubble.sentence}.`)];
    if (bubble.waitsFor >= 0) {
      children.push(element("p", {}, element("button", { type: "button", onclick: () => this.select(index, bubble.waitsFor) }, `Go to ${lane.fullName(bubble.waitsFor)}`)));
    }
    this.details.replaceChildren(...children);
  }

  showTip(hit, event) {
    this.tip.hidden = !hit;
    if (!hit) return;
    const lane = this.chart.lanes[hit.lane];
    const lines = [];
    if (hit.task !== undefined) {
      lines.push(element("b", {}, taskTitle(lane, hit.task)));
      for (const [name, value] of taskFacts(this.chart, hit.lane, hit.task)) lines.push(element("div", {}, `${name}: ${value}`));
    } else if (hit.bubble) {
      lines.push(element("b", {}, `idle ${formatAmount(hit.bubble.end - hit.bubble.start, lane.timeUnit)} (${this.chart.reasons[hit.bubble.reason].name})`), element("div", {}, hit.bubble.sentence));
    } else {
      const cap = lane.memory.cap[hit.device];
      lines.push(element("div", {}, `device ${hit.device} at ${formatAmount(hit.time, lane.timeUnit, 4)}: ${formatAmount(lane.memoryAt(hit.device, hit.time), lane.memoryUnit)}${cap === null ? "" : ` of ${formatNumber(cap)}`}`));
    }
    this.tip.replaceChildren(...lines);
    const { innerWidth, innerHeight } = window;
    const box = this.tip.getBoundingClientRect();
    this.tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 8))}px`;
    this.tip.style.top = `${event.clientY + 18 + box.height > innerHeight ? Math.max(4, event.clientY - box.height - 12) : event.clientY + 18}px`;
  }
}

function chainText(lane, chain) {
  const names = chain.slice().reverse().map((task) => lane.fullName(task));
  const most = 14;
  return names.length <= most ? names.join(" → ") : `${names.slice(0, 4).join(" → ")} → … → ${names.slice(-(most - 4)).join(" → ")}`;
}

applyTheme(storedTheme());
window.zbsolveViewer = { mount: (root, data) => new Viewer(root, data) };
const embedded = document.getElementById("viewer-data");
if (embedded) window.zbsolveViewer.current = new Viewer(document.getElementById("viewer"), JSON.parse(embedded.textContent));
