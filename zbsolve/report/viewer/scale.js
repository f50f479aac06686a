// The visible stretch of time, and its place on the screen.

class View {
  constructor(first, last) {
    this.first = first;
    this.last = last;
    this.left = 0;
    this.width = 1;
    this.fit();
  }

  get length() { return this.to - this.from; }

  place(left, width) {
    this.left = left;
    this.width = Math.max(1, width);
  }

  x(time) { return this.left + ((time - this.from) / this.length) * this.width; }
  time(x) { return this.from + ((x - this.left) / this.width) * this.length; }

  fit() {
    const margin = 0.005 * (this.last - this.first);
    this.from = this.first - margin;
    this.to = this.last + margin;
  }

  get isFitted() { return this.length >= (this.last - this.first) * 1.0099; }

  // Zoom by a factor around a time that stays where it is; never beyond the whole, nor into rounding.
  zoom(factor, around = (this.from + this.to) / 2) {
    const whole = (this.last - this.first) * 1.01;
    const length = Math.min(whole, Math.max(whole * 1e-6, this.length / factor));
    const share = (around - this.from) / this.length;
    this.show(around - share * length, around + (1 - share) * length);
  }

  pan(time) { this.show(this.from + time, this.to + time); }

  // Show a stretch, moved so that it stays on the chart.
  show(from, to) {
    const margin = 0.005 * (this.last - this.first);
    const length = Math.min(to - from, this.last - this.first + 2 * margin);
    this.from = Math.min(Math.max(from, this.first - margin), this.last + margin - length);
    this.to = this.from + length;
  }

  // Bring a stretch of time into view, with room around it, at the least change.
  reveal(from, to) {
    if (from >= this.from && to <= this.to) return;
    const length = Math.max(this.length, 1.2 * (to - from));
    const middle = (from + to) / 2;
    this.show(middle - length / 2, middle + length / 2);
  }

  // Round times about every `gap` pixels.
  ticks(gap = 90) {
    const raw = (this.length * gap) / this.width;
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= raw);
    const ticks = [];
    for (let k = Math.ceil(this.from / step); k * step <= this.to; k += 1) ticks.push(k * step + 0); // no minus zero
    return { ticks, decimals: Math.max(0, -Math.floor(Math.log10(step) + 1e-9)) };
  }
}
