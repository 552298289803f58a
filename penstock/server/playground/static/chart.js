// A small chart: the value now, and a line of what it was.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 100;
const HEIGHT = 40;
const HEADROOM = 3; // above the highest point, so that its line is whole

export class Chart {
  /**
   * keys: one or two fields of the points. format: a value as [number, unit].
   * limit: the least that the scale reaches to. sticky: without a new value the last one stays.
   * of: "text" of models that generate only, "cache" of models with a KV cache only.
   */
  constructor({ title, keys, format, limit = 0, sticky = false, of = "", spanMs }) {
    Object.assign(this, { title, keys, format, limit, sticky, spanMs });
    this.points = [];
    this.pointedAt = null;
    this.element = document.createElement("article");
    this.element.className = of ? `chart of-${of}` : "chart";
    const heading = document.createElement("h3");
    this.top = span("top");
    heading.append(span("", title), this.top);
    this.now = document.createElement("div");
    this.now.className = "now";
    this.svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    this.area = shape("path", { class: "area" });
    this.lines = keys.map((_, index) => shape("path", { class: index ? "second" : "first" }));
    this.rule = shape("line", { y1: 0, y2: HEIGHT, visibility: "hidden" });
    this.svg.append(this.area, ...this.lines.toReversed(), this.rule);
    this.element.append(heading, this.now, this.svg);
    this.element.addEventListener("pointermove", (event) => this.point(event));
    this.element.addEventListener("pointerleave", () => this.point(null));
    this.draw([], 0);
  }

  draw(points, now) {
    this.points = points;
    this.drawnAt = now;
    const values = points.flatMap((point) => this.keys.map((key) => point[key] ?? 0));
    const highest = Math.max(...values, this.limit, 0);
    const scale = highest || 1;
    const x = (point) => WIDTH * (1 - (now - point.at) / this.spanMs);
    const y = (value) => HEIGHT - (HEIGHT - HEADROOM) * (value / scale);
    this.x = x;
    for (const [index, key] of this.keys.entries()) {
      const runs = this.runs(key);
      const path = runs.map((run) => "M" + run.map((p) => `${x(p).toFixed(2)},${y(p[key]).toFixed(2)}`).join("L"));
      // A lone point is drawn as a short line: it would be nothing otherwise.
      const shown = path.map((d, i) => (runs[i].length === 1 ? `${d}h0.01` : d));
      this.lines[index].setAttribute("d", shown.join(""));
      if (index === 0) {
        const closed = path.map((d, i) => `${d}L${x(runs[i].at(-1)).toFixed(2)},${HEIGHT}L${x(runs[i][0]).toFixed(2)},${HEIGHT}Z`);
        this.area.setAttribute("d", closed.join(""));
      }
    }
    this.top.textContent = highest > 0 ? this.text(highest) : "";
    this.showValue();
  }

  /** Stretches of points that have a value; a sticky one goes on over gaps. */
  runs(key) {
    const runs = [[]];
    for (const point of this.points) {
      if (point[key] != null) runs.at(-1).push(point);
      else if (!this.sticky && runs.at(-1).length) runs.push([]);
    }
    return runs.filter((run) => run.length);
  }

  point(event) {
    this.pointedAt = null;
    if (event && this.points.length) {
      const box = this.svg.getBoundingClientRect();
      const at = (WIDTH * (event.clientX - box.left)) / box.width;
      const distance = (point) => Math.abs(this.x(point) - at);
      this.pointedAt = this.points.reduce((best, point) => (distance(point) < distance(best) ? point : best));
    }
    this.showValue();
  }

  showValue() {
    const shown = this.pointedAt ?? this.latest();
    const pieces = this.keys.flatMap((key) => {
      const [number, unit] = shown?.[key] == null ? ["–", ""] : this.format(shown[key], key);
      return [number, span("", unit, "small")];
    });
    if (this.pointedAt) pieces.push(span("", `· ${Math.round((this.drawnAt - shown.at) / 1000)} s ago`, "small"));
    this.now.replaceChildren(...pieces.map((piece, i) => (i > 1 && typeof piece === "string" ? ` ${piece}` : piece)));
    this.rule.setAttribute("visibility", this.pointedAt ? "visible" : "hidden");
    if (this.pointedAt) {
      this.rule.setAttribute("x1", this.x(shown));
      this.rule.setAttribute("x2", this.x(shown));
    }
    const latest = this.latest();
    const said = this.keys.map((key) => (latest?.[key] == null ? "not known" : this.format(latest[key], key).join(" ")));
    this.svg.setAttribute("aria-label", `${this.title}: ${said.join(", ")}`);
  }

  latest() {
    const last = this.points.at(-1);
    if (!this.sticky || !last) return last;
    return this.points.findLast((point) => point[this.keys[0]] != null) ?? last;
  }

  text(value) {
    const [number, unit] = this.format(value, "");
    return `${number}${unit === "%" || unit === "s" || unit === "ms" ? ` ${unit}` : ""}`;
  }
}

function shape(name, attributes) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

function span(className, text = "", tag = "span") {
  const element = document.createElement(tag);
  element.className = className;
  element.textContent = text;
  return element;
}
