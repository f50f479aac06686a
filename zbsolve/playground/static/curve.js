// Cost and bound over the seconds of a solve, as steps that meet when the plan is proven.

class Curve {
  constructor(root) {
    this.root = root;
    this.points = [];
  }

  add({ seconds, cost, bound }) {
    this.points.push({ seconds, cost, bound });
    this.draw();
  }

  // The last figures hold until now.
  draw(now = this.points.at(-1)?.seconds ?? 0) {
    if (!this.points.length) { this.root.replaceChildren(); return; }
    const [width, height, left, right, top, bottom] = [this.root.clientWidth || 600, 190, 74, 14, 12, 30];
    const last = Math.max(now, this.points.at(-1).seconds, 0.1);
    const values = this.points.flatMap(({ cost, bound }) => [cost, bound]);
    let [low, high] = [Math.min(...values), Math.max(...values)];
    const margin = high > low ? 0.08 * (high - low) : 0.02 * Math.abs(high) || 1;
    low -= margin;
    high += margin;
    const x = (seconds) => left + (seconds / last) * (width - left - right);
    const y = (value) => top + ((high - value) / (high - low)) * (height - top - bottom);
    const steps = (name) => this.points.map((point, k) => {
      const until = this.points[k + 1]?.seconds ?? last;
      return `${x(point.seconds).toFixed(1)},${y(point[name]).toFixed(1)} ${x(until).toFixed(1)},${y(point[name]).toFixed(1)}`;
    }).join(" ");
    const node = (tag, attributes, text = "") => {
      const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
      for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
      made.textContent = text;
      return made;
    };
    const picture = node("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
    const { cost, bound } = this.points.at(-1);
    picture.setAttribute("aria-label", `Cost ${format(cost)} and lower bound ${format(bound)} after ${last.toFixed(1)} seconds`);
    for (const share of [0, 0.5, 1]) {
      const value = low + margin + share * (high - low - 2 * margin);
      picture.append(node("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }),
        node("text", { x: left - 8, y: y(value) + 4, "text-anchor": "end" }, format(value)));
    }
    picture.append(node("text", { x: left, y: height - 8 }, "0 s"),
      node("text", { x: width - right, y: height - 8, "text-anchor": "end" }, `${last.toFixed(1)} s`),
      node("text", { x: left + (width - left - right) / 2, y: height - 8, "text-anchor": "middle" }, "cost (line) and lower bound (dashed)"),
      node("polyline", { class: "bound", points: steps("bound") }), node("polyline", { class: "cost", points: steps("cost") }));
    this.root.replaceChildren(picture);
  }
}

function format(value) {
  return value.toLocaleString("en-US", { maximumSignificantDigits: 6 });
}
