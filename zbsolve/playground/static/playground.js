// The form, the table of baselines, the solve and its events. Drawing is the viewer's.

(() => {
  "use strict";
  const $ = (id) => document.getElementById(id);
  const NUMBERS = ["p", "m", "v", "t_f", "t_b", "t_w", "t_comm", "mem_b", "mem_w", "time_limit"];
  const TEXTS = ["placement", "cap", "objective", "solver"];
  let settings = {};
  let viewer = null;
  let asked = 0; // only the newest answer counts
  let aborter = null;
  let timer = 0;
  let job = null; // {key, source, began}
  let solved = null; // {key, row}
  let curve = null;

  // --- settings ------------------------------------------------------------------------------

  function readForm() {
    for (const name of NUMBERS) settings[name] = $(name).valueAsNumber;
    settings.n = $("n").value === "" ? null : $("n").valueAsNumber;
    for (const name of TEXTS) settings[name] = $(name).value.trim();
  }

  function writeForm() {
    for (const name of [...NUMBERS, ...TEXTS]) $(name).value = settings[name];
    $("n").value = settings.n ?? "";
    const { instance } = settings;
    $("loaded").hidden = !instance;
    $("shape").hidden = Boolean(instance);
    for (const field of $("shape").querySelectorAll("input, select")) field.disabled = Boolean(instance);
    if (instance) $("loaded-name").textContent = `${instance.name ?? "unnamed"}: ${instance.num_devices} devices, ${instance.stages.length} stages, ${instance.num_microbatches} micro-batches`;
    $("v").disabled = Boolean(instance) || settings.placement === "linear";
    $("link").hidden = true;
    $("form").classList.remove("linked");
  }

  function toHash(value) {
    const bytes = new TextEncoder().encode(JSON.stringify(value));
    return btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join(""))
      .replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "");
  }

  function fromHash(text) {
    const raw = atob(text.replaceAll("-", "+").replaceAll("_", "/"));
    return JSON.parse(new TextDecoder().decode(Uint8Array.from(raw, (letter) => letter.charCodeAt(0))));
  }

  // --- requests ------------------------------------------------------------------------------

  function posted(body) {
    const text = typeof body === "string" ? body : JSON.stringify(body);
    return { method: "POST", headers: { "Content-Type": "application/json" }, body: text };
  }

  async function send(path, options) {
    let answer;
    try {
      answer = await fetch(path, options);
    } catch {
      throw new Error("the playground does not answer: is zbsolve still running?");
    }
    if (answer.ok) return answer;
    const data = await answer.json().catch(() => ({}));
    throw new Error(data.error ?? `the playground answered ${answer.status}`);
  }

  async function ask(path, body) {
    return (await send(path, body === undefined ? {} : posted(body))).json();
  }

  // The lines of an answer as they come.
  async function* lines(path, body, signal) {
    const answer = await send(path, { ...posted(body), signal });
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n");
      rest = parts.pop();
      for (const part of parts) yield JSON.parse(part);
    }
  }

  function showError(error) {
    $("error").hidden = !error;
    $("error").textContent = error ? error.message : "";
  }

  // --- baselines -----------------------------------------------------------------------------

  async function refresh() {
    if (!$("form").checkValidity()) return;
    readForm();
    writeForm();
    asked += 1;
    const mine = asked;
    aborter?.abort(); // what an older answer has left to say is not wanted
    aborter = new AbortController();
    try {
      for await (const line of lines("/api/baselines", settings, aborter.signal)) {
        if (mine !== asked) return;
        hearBaseline(line);
      }
    } catch (error) {
      if (mine === asked) showError(error);
    }
  }

  function hearBaseline(line) {
    if (line.type === "head") {
      showError(null);
      solved = null;
      if (!job) $("solving").hidden = true;
      shown = { ...line, chosen: null, rows: [], notApplicable: [], complete: false };
    } else if (line.type === "row") shown.rows.push(line);
    else if (line.type === "rule") shown.notApplicable.push(line);
    else if (line.type === "page") {
      shown.chosen = line.name;
      if (!solved) draw(line.page);
    } else shown.complete = true;
    showTable(shown);
  }

  function later() {
    clearTimeout(timer);
    timer = setTimeout(refresh, 250);
  }

  function cell(tag, text, attributes = {}) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.textContent = text;
    return node;
  }

  function row(tag, texts, first) {
    const line = document.createElement("tr");
    line.append(first, ...texts.map((text) => cell(tag, text, tag === "th" ? { scope: "col" } : {})));
    return line;
  }

  function figures(entry) {
    const share = (value) => `${(100 * value).toFixed(2)} %`;
    return [format(entry.makespan), format(entry.span), share(entry.bubble_rate_makespan), format(entry.peak_memory),
      entry.fits_cap ? "yes" : "no", entry.gain_text];
  }

  let shown = null; // the newest answer's lines so far
  function showTable(data) {
    const { unit, memoryUnit } = data;
    const head = document.createElement("thead");
    head.append(row("th", [`makespan (${unit})`, `span (${unit})`, "bubble rate by makespan", `peak memory (${memoryUnit})`, "fits the cap", "gain over 1F1B"], cell("th", "schedule", { scope: "col" })));
    const body = document.createElement("tbody");
    const found = new Map(data.rows.map((entry) => [entry.name, entry]));
    const refused = new Set(data.notApplicable.map(({ name }) => name));
    for (const wanted of data.names) {
      if (refused.has(wanted)) continue;
      const entry = found.get(wanted);
      if (!entry) {
        body.append(row("td", ["…", "", "", "", "", ""], cell("th", wanted, { scope: "row" })));
        continue;
      }
      const name = cell("th", "", { scope: "row" });
      const button = cell("button", entry.label, { type: "button" });
      button.addEventListener("click", () => choose(entry.name));
      name.append(button);
      const line = row("td", figures(entry), name);
      if (entry.name === data.chosen && !solved) line.className = "chosen";
      body.append(line);
    }
    if (solved) {
      const line = row("td", solved.figures, cell("th", "solved plan", { scope: "row" }));
      line.className = "solved chosen";
      body.append(line);
    }
    $("baselines").replaceChildren(head, body);
    const rules = data.notApplicable.map(({ name, rule }) => `${name}: ${rule}`);
    $("notes").textContent = [data.oneFOneB, rules.length ? `Not applicable: ${rules.join("; ")}.` : "", `${data.tasks.toLocaleString("en-US")} tasks.`].filter(Boolean).join(" ");
  }

  function choose(name) {
    settings.schedule = name;
    refresh();
  }

  function draw(page) {
    viewer?.destroy();
    viewer = window.zbsolveViewer.mount($("viewer"), page);
    window.zbsolveViewer.current = viewer;
  }

  // --- solving -------------------------------------------------------------------------------

  async function solve() {
    readForm();
    try {
      const { key } = await ask("/api/jobs", settings);
      showError(null);
      $("solving").hidden = false;
      $("downloads").hidden = true;
      $("status").textContent = "starting …";
      $("curve").replaceChildren();
      curve = new Curve($("curve"));
      job = { key, began: performance.now(), against: shown?.chosen, unit: shown?.unit ?? "", objective: settings.objective };
      setBusy(true);
      job.clock = setInterval(() => curve.draw(curve.points.length ? Math.max(curve.points.at(-1).seconds, job.offset + (performance.now() - job.began) / 1000) : 0), 500);
      job.source = new EventSource(`/api/jobs/${key}/events`);
      job.source.onmessage = (event) => hear(JSON.parse(event.data));
      job.source.onerror = () => { if (job) finish(new Error("the playground does not answer: is zbsolve still running?")); };
    } catch (error) {
      showError(error);
    }
  }

  function hear(line) {
    if (!job) return;
    if (line.type === "progress") {
      job.offset = line.seconds - (performance.now() - job.began) / 1000;
      curve.add(line);
      $("status").textContent = `${line.seconds.toFixed(1)} s: ${job.objective} ${format(line.cost)} ${job.unit}, bound ${format(line.bound)}, gap ${(100 * line.gap).toFixed(2)} % (${line.who})`;
    } else if (line.type === "error") {
      finish(new Error(line.message));
    } else {
      curve.add({ seconds: line.seconds, cost: line.cost, bound: line.bound });
      const ended = line.status === "optimal" ? "proven optimal" : line.interrupted ? "cancelled: the best plan until then" : "best found";
      $("status").textContent = `${ended}: ${job.objective} ${format(line.cost)} ${job.unit}, lower bound ${format(line.bound)}, gap ${(100 * line.gap).toFixed(3)} % (found by ${line.found_by}, bound by ${line.proved_by}, ${line.seconds.toFixed(1)} s)`;
      const { key, against } = job;
      finish(null);
      showSolved(key, against);
    }
  }

  function finish(error) {
    job.source.close();
    clearInterval(job.clock);
    job = null;
    setBusy(false);
    if (error) {
      $("status").textContent = error.message;
      showError(error);
    }
  }

  async function showSolved(key, against) {
    try {
      const page = await ask(`/api/jobs/${key}/page?against=${encodeURIComponent(against ?? "")}`);
      const [lane] = page.lanes;
      const { makespan, span, bubbleRateMakespan } = lane.figures;
      const reference = shown?.rows.find(({ name, fits_cap }) => name === "1f1b" && fits_cap)?.[lane.figures.objective];
      const gain = reference ? (reference - lane.figures[lane.figures.objective]) / reference : null;
      solved = { figures: [format(makespan), format(span), `${(100 * bubbleRateMakespan).toFixed(2)} %`, format(Math.max(...lane.memory.peak)), "yes",
        gain === null ? "-" : gain > 5e-5 ? `${(100 * gain).toFixed(1)}% of the step` : "no gain"] };
      if (shown) showTable(shown);
      draw(page);
      const links = ["plan.json", "plan.csv", "plan.png", "plan.svg", "plan.trace.json", "plan.html"].map((name) => {
        const link = cell("a", name, { href: `/api/jobs/${key}/files/${name}`, download: name });
        return link;
      });
      $("downloads").replaceChildren("Download: ", ...links.flatMap((link) => [link, " "]));
      $("downloads").hidden = false;
    } catch (error) {
      showError(error);
    }
  }

  function setBusy(busy) {
    $("solve").disabled = busy;
    $("cancel").disabled = !busy;
  }

  // --- files and links -----------------------------------------------------------------------

  async function load(file) {
    try {
      const { instance } = await ask(`/api/instance?name=${encodeURIComponent(file.name)}`, await file.text());
      settings.instance = instance;
      settings.cap = "";
      writeForm();
      refresh();
    } catch (error) {
      showError(error);
    } finally {
      $("file").value = "";
    }
  }

  async function share() {
    readForm();
    location.hash = toHash(settings);
    $("link").value = location.href;
    $("link").hidden = false;
    $("form").classList.add("linked");
    try {
      await navigator.clipboard.writeText(location.href);
      $("share").textContent = "Copied";
      setTimeout(() => { $("share").textContent = "Copy a link to this setting"; }, 1500);
    } catch {
      $("link").select(); // no permission: the link is there to copy by hand
    }
  }

  function followLink(defaults) {
    settings = { ...defaults };
    if (location.hash.length <= 1) return;
    try {
      const known = Object.entries(fromHash(location.hash.slice(1))).filter(([name]) => name in defaults || name === "n" || name === "instance");
      Object.assign(settings, Object.fromEntries(known));
    } catch {
      showError(new Error("the link is damaged: the defaults are shown"));
    }
  }

  async function start() {
    const { defaults, solvers } = await ask("/api/choices");
    $("solver").replaceChildren(...solvers.map((name) => cell("option", name)));
    followLink(defaults);
    writeForm();
    $("form").addEventListener("input", (event) => { if (!["file", "time_limit", "solver", "link"].includes(event.target.id)) later(); });
    $("form").addEventListener("submit", (event) => { event.preventDefault(); if (!job) solve(); });
    $("cancel").addEventListener("click", () => { if (job) { $("cancel").disabled = true; ask(`/api/jobs/${job.key}/cancel`, {}).catch(showError); } });
    $("file").addEventListener("change", () => { if ($("file").files.length) load($("file").files[0]); });
    $("unload").addEventListener("click", () => { delete settings.instance; settings.cap = ""; writeForm(); refresh(); });
    $("share").addEventListener("click", share);
    window.addEventListener("resize", () => curve?.draw());
    window.addEventListener("hashchange", () => { if (location.hash.slice(1) !== toHash(settings)) { followLink(defaults); writeForm(); refresh(); } });
    refresh();
  }

  start().catch(showError);
})();
