// One lane of the chart: a schedule's tasks as columns, in the order of the devices' programs.

class Lane {
  constructor(data, kinds) {
    Object.assign(this, {
      name: data.name, instance: data.instance, timeUnit: data.timeUnit, memoryUnit: data.memoryUnit,
      stages: data.stages, offsets: data.offsets, figures: data.figures, memory: data.memory ?? null,
      devices: data.devices ?? null, waits: data.waits ?? [], measured: Boolean(data.measured), kinds,
    });
    const { kind, stage, microbatch, start, end, slack, cause } = data.tasks;
    this.kind = Uint8Array.from(kind);
    this.stage = Int32Array.from(stage);
    this.microbatch = Int32Array.from(microbatch);
    this.start = Float64Array.from(start);
    this.end = Float64Array.from(end);
    this.slack = slack ? Float64Array.from(slack) : null;
    this.cause = cause ? Int32Array.from(cause) : null;
    this.critical = data.critical ?? [];
    this.isCritical = new Uint8Array(this.size);
    for (const task of this.critical) this.isCritical[task] = 1;
    this.bubbles = Array.from({ length: this.deviceCount }, () => []);
    for (const [device, from, to, reason, following, waitsFor, sentence] of data.bubbles ?? []) {
      this.bubbles[device].push({ device, start: from, end: to, reason, following, waitsFor, sentence });
    }
    this.first = this.start.reduce((least, time) => Math.min(least, time), Infinity);
    this.last = this.end.reduce((most, time) => Math.max(most, time), -Infinity);
    if (!this.size) [this.first, this.last] = [0, 1];
    const chunks = new Map(); // device: stages seen so far
    this.chunk = this.stages.map(({ device }) => {
      chunks.set(device, (chunks.get(device) ?? -1) + 1);
      return chunks.get(device);
    });
    this.copyLength = data.chain; // stages of one copy of the model
    // An F&B pair shares its interval: upper half 1, lower half 2; all others have the whole height.
    this.half = new Uint8Array(this.size);
    for (let device = 0; device < this.deviceCount; device += 1) {
      for (let task = this.offsets[device] + 1; task < this.offsets[device + 1]; task += 1) {
        if (this.start[task] >= this.end[task - 1] || this.start[task] !== this.start[task - 1]) continue;
        this.half[task - 1] = 1;
        this.half[task] = 2;
      }
    }
    this.severalStages = this.stages.length !== this.deviceCount;
  }

  get size() { return this.kind.length; }
  get deviceCount() { return this.offsets.length - 1; }

  device(task) { return this.stages[this.stage[task]].device; }

  // "F3": kind and micro-batch; with the stage before it ("F2.3") where a device holds several.
  label(task) {
    const stage = this.severalStages ? `${this.stage[task]}.` : "";
    return `${this.kinds[this.kind[task]].name}${stage}${this.microbatch[task]}`;
  }

  // "F2.3", as plans, errors and sentences write it.
  fullName(task) {
    return `${this.kinds[this.kind[task]].name}${this.stage[task]}.${this.microbatch[task]}`;
  }

  // First task of a device that ends after a time; the device's end where there is none.
  firstEndingAfter(device, time) {
    let low = this.offsets[device];
    let high = this.offsets[device + 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.end[middle] > time) high = middle; else low = middle + 1;
    }
    return low;
  }

  // The task that runs at a time; of an F&B pair the upper one unless `lower`.
  taskAt(device, time, lower = false) {
    const task = this.firstEndingAfter(device, time);
    if (task >= this.offsets[device + 1] || this.start[task] > time) return -1;
    return lower && this.half[task] === 1 ? task + 1 : task;
  }

  // Share of a lane's height at which a task's box begins, and how much it takes.
  boxPlace(task) { return [this.half[task] === 2 ? 0.5 : 0, this.half[task] ? 0.5 : 1]; }

  bubbleAt(device, time) {
    return this.bubbles[device].find((bubble) => bubble.start <= time && time < bubble.end) ?? null;
  }

  // Memory of a device at a time: while a task runs, else what the last one left.
  memoryAt(device, time) {
    const task = this.firstEndingAfter(device, time);
    if (task < this.offsets[device + 1] && this.start[task] <= time) return this.memory.during[task];
    return task > this.offsets[device] ? this.memory.after[task - 1] : this.memory.static[device];
  }

  replica(task) { return Math.floor(this.stage[task] / this.copyLength); }

  // All tasks of a micro-batch of one copy of the model by start.
  path(microbatch, replica = 0) {
    const tasks = [];
    for (let task = 0; task < this.size; task += 1) {
      if (this.microbatch[task] === microbatch && this.replica(task) === replica) tasks.push(task);
    }
    return tasks.sort((a, b) => this.start[a] - this.start[b] || this.end[a] - this.end[b]);
  }

  // Pairs (from, to) of a micro-batch's tasks that hand something on: F up the stages, back down, B to its W.
  links(microbatch, replica = 0) {
    const at = new Map(this.path(microbatch, replica).map((task) => [this.fullName(task), task]));
    const task = (kind, stage) => at.get(`${kind}${stage}.${microbatch}`);
    const back = (stage) => task("B", stage) ?? task("BW", stage);
    const pairs = [];
    const first = replica * this.copyLength;
    for (let stage = first; stage < first + this.copyLength; stage += 1) {
      const recomputed = task("R", stage);
      if (recomputed !== undefined) pairs.push([task("F", stage), recomputed], [recomputed, back(stage)]);
      if (stage + 1 < first + this.copyLength) {
        pairs.push([task("F", stage), task("F", stage + 1)], [back(stage + 1), back(stage)]);
      } else if (recomputed === undefined) pairs.push([task("F", stage), back(stage)]);
      pairs.push([task("B", stage), task("W", stage)]);
    }
    return pairs.filter(([from, to]) => from !== undefined && to !== undefined);
  }

  // What fixed a task's start, and what fixed that one's, back to a start that nothing holds.
  chain(task) {
    const chain = [];
    for (let at = task; at >= 0 && chain.length <= this.size; at = this.cause[at]) chain.push(at);
    return chain;
  }

  // Tasks by start: the events to step through.
  get events() {
    this.sorted ??= Uint32Array.from(this.kind.keys())
      .sort((a, b) => this.start[a] - this.start[b] || this.device(a) - this.device(b) || a - b);
    return this.sorted;
  }

  // "F2.3", "f3" (the stage that comes first) or "mb 3": the task meant, or -1.
  search(text) {
    const [, kind, stage, microbatch] = /^\s*(f|r|bw|b|w|mb)?\s*(?:(\d+)\s*\.)?\s*(\d+)\s*$/i.exec(text) ?? [];
    if (microbatch === undefined) return -1;
    const wanted = kind && kind.toLowerCase() !== "mb" ? kind.toUpperCase() : null;
    const replica = stage === undefined ? 0 : Math.floor(Number(stage) / this.copyLength);
    return this.path(Number(microbatch), replica).find((task) =>
      (wanted === null || this.kinds[this.kind[task]].name === wanted)
      && (stage === undefined || this.stage[task] === Number(stage))) ?? -1;
  }
}
