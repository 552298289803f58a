// Looks at the server every second, while anyone looks at the page.

import { request } from "./api.js";
import { Chart } from "./chart.js";
import { engines, hasNoCache, parseMetrics, pointBetween } from "./prometheus.js";

const PERIOD_MS = 1000;
const SPAN_MS = 2 * 60 * 1000;

const count = (value, unit) => [value.toFixed(value < 10 && !Number.isInteger(value) ? 1 : 0), unit];
const share = (value) => [(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0), "%"];
const duration = (value) => (value < 1 ? [(1000 * value).toFixed(0), "ms"] : [value.toFixed(value < 10 ? 2 : 1), "s"]);

const CHARTS = [
  { title: "Requests", keys: ["running", "waiting"], format: (value, key) => [value.toFixed(0), key], limit: 4 },
  { title: "KV cache", keys: ["kv"], format: share, limit: 0.1, of: "cache" },
  { title: "Generated", keys: ["generation"], format: (value) => count(value, "tokens/s"), of: "text" },
  { title: "Prompts", keys: ["prompt"], format: (value) => count(value, "tokens/s") },
  { title: "First token", keys: ["firstToken"], format: duration, sticky: true, of: "text" },
  { title: "Prefix hits", keys: ["prefix"], format: share, limit: 1, sticky: true, of: "cache" },
  { title: "Accepted drafts", keys: ["drafts"], format: share, limit: 1, sticky: true, of: "drafts" },
];

export class Dashboard {
  /** `onState` is told "ready", "down" or "locked", with words for it. */
  constructor({ onState }) {
    this.onState = onState;
    this.points = [];
    this.before = null;
    this.charts = CHARTS.map((spec) => new Chart({ ...spec, spanMs: SPAN_MS }));
    document.getElementById("charts").append(...this.charts.map((chart) => chart.element));
    document.addEventListener("visibilitychange", () => this.look());
    this.look();
  }

  /** Look now, and again in a while. */
  async look() {
    clearTimeout(this.timer);
    if (document.hidden || this.isLooking) return;
    this.isLooking = true;
    try {
      await this.readHealth();
      await this.readMetrics();
      if (this.hasReplicas) await this.readReplicas();
    } finally {
      this.isLooking = false;
      this.timer = setTimeout(() => this.look(), PERIOD_MS);
    }
  }

  async readHealth() {
    try {
      await (await request("health")).text();
      this.isUp = true;
    } catch (error) {
      this.isUp = false;
      this.onState("down", error.status === 503 ? "engine is down" : "unreachable");
    }
  }

  async readMetrics() {
    let values;
    try {
      const text = await (await request("metrics")).text();
      values = parseMetrics(text);
      document.body.classList.toggle("cacheless", hasNoCache(text));
      this.hasReplicas = engines(text) > 1 || this.hasReplicas;
      document.body.classList.toggle("drafting", values.get("spec_decode_num_drafts_total") > 0);
    } catch (error) {
      if (error.status === 401) this.onState("locked", "needs a key");
      this.before = null;
      return;
    }
    const now = performance.now();
    const seconds = this.before ? (now - this.before.at) / 1000 : 0;
    this.points.push({ at: now, ...pointBetween(this.before?.values, values, seconds) });
    this.points = this.points.filter((point) => now - point.at <= SPAN_MS);
    this.before = { at: now, values };
    for (const chart of this.charts) chart.draw(this.points, now);
    if (this.isUp) this.onState("ready", "ready");
  }

  /** One line for each replica: what it does, and how many requests it has. */
  async readReplicas() {
    let load;
    try {
      load = await (await request("load")).json();
    } catch {
      return; // the other looks say what is wrong
    }
    const list = document.getElementById("replicas");
    list.hidden = false;
    list.replaceChildren(
      ...load.replicas.map((replica) => {
        const item = document.createElement("li");
        item.dataset.state = replica.state;
        const requests = `${replica.server_load} request${replica.server_load === 1 ? "" : "s"}`;
        const cache = share(replica.kv_cache_usage).join(" ");
        item.textContent = `Replica ${replica.engine}: ${replica.state}, ${requests}, KV cache ${cache}`;
        return item;
      }),
    );
  }
}
