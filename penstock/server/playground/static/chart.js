// A chart: the values now, their lines, and axes that say what they are.

import { element } from "./element.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 100;
const HEIGHT = 40;
const MAX_POINTS = 120; // of a line; more are averaged

export class Chart {
  /**
   * keys: the lines, as names of the points' fields with the words for them. format: a value as
   * [number, unit]. limit: the least that the scale reaches to. sticky: without a new value the
   * last one stays. of: "text" of models that generate only, "cache" of models with a KV cache
   * only, "drafts" of servers that draft only.
   */
  constructor({ title, about, keys, format, limit = 0, sticky = false, of = "" }) {
    Object.assign(this, { title, names: Object.values(keys), keys: Object.keys(keys), format, limit, sticky });
    this.points = [];
    this.pointedAt = null;
    this.now = element("div", { class: "now" });
    this.svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    this.area = shape("path", { class: "area" });
    this.lines = this.keys.map((_, index) => shape("path", { class: index ? "second" : "first" }));
    this.rule = shape("line", { class: "rule", y1: 0, y2: HEIGHT, visibility: "hidden" });
    const grid = [0, 0.5, 1].map((share) => shape("line", { x1: 0, x2: WIDTH, y1: HEIGHT * share, y2: HEIGHT * share }));
    this.svg.append(...grid, this.area, ...this.lines.toReversed(), this.rule);
    this.top = element("span");
    this.middle = element("span");
    this.bottom = element("span");
    this.start = element("span");
    this.half = element("span");
    this.element = element(
      "article", { class: of ? `chart of-${of}` : "chart" },
      element("h3", {}, element("span", {}, title)), element("p", { class: "about" }, about), this.now,
      element("div", { class: "plot" },
        element("div", { class: "scale", "aria-hidden": "true" }, this.top, this.middle, this.bottom), this.svg,
        element("div", { class: "times", "aria-hidden": "true" }, this.start, this.half, element("span", {}, "now"))),
    );
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.point(null));
    this.draw([], 0, 1);
  }

  /** The points of the last `spanMs`. */
  draw(points, now, spanMs) {
    this.points = averaged(points, now, spanMs, this.keys);
    this.latest = this.sticky ? points.findLast((point) => point[this.keys[0]] != null) : points.at(-1);
    this.drawnAt = now;
    const values = this.points.flatMap((point) => this.keys.map((key) => point[key] ?? 0));
    const top = niceAbove(Math.max(...values, this.limit, 0)) || 1;
    const x = (point) => WIDTH * (1 - (now - point.at) / spanMs);
    const y = (value) => HEIGHT * (1 - value / top);
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
    const marks = [[this.top, top], [this.middle, top / 2], [this.bottom, 0]];
    for (const [place, value] of marks) place.textContent = this.mark(value);
    const minutes = spanMs / 60_000;
    this.start.textContent = `−${minutes} min`;
    this.half.textContent = `−${minutes / 2} min`;
    this.showValue();
  }

  /** A value on the scale. Long units are above the chart. */
  mark(value) {
    const [number, unit] = this.format(value, this.keys[0]);
    return unit.length > 2 ? number : `${number} ${unit}`;
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
    const shown = this.pointedAt ?? this.latest;
    const pieces = this.keys.map((key, index) => {
      const [number, unit] = shown?.[key] == null ? ["–", ""] : this.format(shown[key], key);
      const words = [unit, this.names[index]].filter(Boolean).join(" ");
      return element("span", { class: index ? "second" : "first" }, number, element("small", {}, words));
    });
    if (this.pointedAt) pieces.push(element("small", {}, `${Math.round((this.drawnAt - shown.at) / 1000)} s ago`));
    this.now.replaceChildren(...pieces);
    this.rule.setAttribute("visibility", this.pointedAt ? "visible" : "hidden");
    if (this.pointedAt) {
      this.rule.setAttribute("x1", this.x(shown));
      this.rule.setAttribute("x2", this.x(shown));
    }
    const said = this.keys.map((key, index) => {
      const value = this.latest?.[key] == null ? "not known" : this.format(this.latest[key], key).join(" ");
      return [value, this.names[index]].filter(Boolean).join(" ");
    });
    this.svg.setAttribute("aria-label", `${this.title}: ${said.join(", ")}`);
  }
}

/** At most MAX_POINTS points, each the mean of those near it. */
function averaged(points, now, spanMs, keys) {
  const inSpan = points.filter((point) => now - point.at <= spanMs);
  if (inSpan.length <= MAX_POINTS) return inSpan;
  const groups = new Map();
  for (const point of inSpan) {
    const index = Math.floor((point.at * MAX_POINTS) / spanMs);
    groups.set(index, [...(groups.get(index) ?? []), point]);
  }
  return [...groups.values()].map((group) => {
    const made = { at: group.at(-1).at };
    for (const key of keys) {
      const values = group.map((point) => point[key]).filter((value) => value != null);
      made[key] = values.length ? values.reduce((sum, value) => sum + value) / values.length : null;
    }
    return made;
  });
}

/** 1, 2, 4, 6 or 8 times a power of ten: half of it is easy to read, too. */
function niceAbove(value) {
  if (value <= 0) return 0;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 6, 8, 10].map((factor) => factor * power).find((mark) => mark >= value * 0.9999);
}

function shape(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}
