// Looks at the server every second, while anyone looks at the page.

import { request } from "./api.js";
import { Chart } from "./chart.js";
import { element } from "./element.js";
import { adaptersOf, engines, hasNoCache, parseMetrics, pointBetween, quantileBetween } from "./prometheus.js";

const PERIOD_MS = 1000;
const LONGEST_MS = 60 * 60 * 1000;
const QUANTILES_MS = 15 * 1000; // a quantile is of what happened in this time

const rounded = (value) => String(Number(value.toFixed(value < 10 ? 1 : 0)));
const count = (value) => [rounded(value), ""];
const rate = (value) => [rounded(value), "tokens/s"];
const share = (value) => [String(Number((100 * value).toFixed(value < 0.1 ? 1 : 0))), "%"];
const duration = (value) => (value < 1 ? [rounded(1000 * value), "ms"] : [String(Number(value.toFixed(value < 10 ? 2 : 1))), "s"]);

const HISTOGRAMS = {
  ttft: "time_to_first_token_seconds",
  itl: "inter_token_latency_seconds",
  queue: "request_queue_time_seconds",
};
const quantiles = (name) => ({ [`${name}50`]: "median", [`${name}95`]: "95th percentile" });

const CHARTS = [
  { title: "Requests", about: "in the engine", keys: { running: "running", waiting: "waiting" }, format: count, limit: 4 },
  { title: "Output", about: "generated tokens per second", keys: { generation: "" }, format: rate, of: "text" },
  { title: "Prompts", about: "prompt tokens per second", keys: { prompt: "" }, format: rate },
  { title: "Time to first token", about: "from the request to its first token", keys: quantiles("ttft"), format: duration, sticky: true, of: "text" },
  { title: "Inter-token latency", about: "between two tokens of a request", keys: quantiles("itl"), format: duration, sticky: true, of: "text" },
  { title: "Queue time", about: "from the request to its first step", keys: quantiles("queue"), format: duration, sticky: true },
  { title: "KV cache", about: "share of the blocks in use", keys: { kv: "" }, format: share, limit: 0.1, of: "cache" },
  { title: "Prefix cache hits", about: "share of the prompt tokens", keys: { prefix: "" }, format: share, limit: 1, sticky: true, of: "cache" },
  { title: "Accepted drafts", about: "share of the drafted tokens", keys: { drafts: "" }, format: share, limit: 1, sticky: true, of: "drafts" },
  { title: "Acceptance length", about: "tokens per step that verifies drafts", keys: { acceptance: "" }, format: count, limit: 2, sticky: true, of: "drafts" },
];

const $ = (id) => document.getElementById(id);

export class Dashboard {
  /** `onState` is told "ready", "down" or "locked", with words for it. */
  constructor({ onState }) {
    this.onState = onState;
    this.points = [];
    this.looks = []; // {at, values, buckets}, of the last seconds
    this.charts = CHARTS.map((spec) => new Chart(spec));
    $("charts").append(...this.charts.map((chart) => chart.element));
    $("span").addEventListener("change", () => this.draw());
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
    let text;
    try {
      text = await (await request("metrics")).text();
    } catch (error) {
      if (error.status === 401) this.onState("locked", "needs a key");
      else if (this.isUp) this.onState("ready", "ready"); // a proxy may keep the metrics to itself
      this.say(`The metrics cannot be read: ${error.message}`);
      this.looks = [];
      $("live").textContent = "";
      return;
    }
    const { values, buckets } = parseMetrics(text);
    document.body.classList.toggle("cacheless", hasNoCache(text));
    document.body.classList.toggle("drafting", values.get("spec_decode_num_drafts_total") > 0);
    this.hasReplicas = engines(text) > 1 || this.hasReplicas;
    this.add({ at: performance.now(), values, buckets });
    this.draw();
    this.showAdapters(adaptersOf(text, values));
    this.say("");
    if (this.isUp) this.onState("ready", "ready");
  }

  say(words) {
    if ($("charts-note").textContent !== words) $("charts-note").textContent = words;
  }

  /** The point between the last look and this one. */
  add(look) {
    const { at, values, buckets } = look;
    this.looks = this.looks.filter((other) => at - other.at <= QUANTILES_MS);
    const [oldest] = this.looks;
    const last = this.looks.at(-1);
    const point = { at, ...pointBetween(last?.values, values, last ? (at - last.at) / 1000 : 0) };
    for (const [name, histogram] of Object.entries(HISTOGRAMS)) {
      for (const percent of [50, 95]) {
        point[`${name}${percent}`] = quantileBetween(oldest?.buckets, buckets, histogram, percent / 100);
      }
    }
    this.points = this.points.filter((other) => at - other.at <= LONGEST_MS);
    this.points.push(point);
    this.looks.push(look);
  }

  draw() {
    const last = this.points.at(-1);
    if (!last) return;
    const spanMs = Number($("span").value) * 60_000;
    for (const chart of this.charts) chart.draw(this.points, last.at, spanMs);
    const { running, waiting, generation } = last;
    const isIdle = !running && !waiting;
    $("live").textContent = isIdle ? "" : `${running} running · ${waiting} waiting · ${rate(generation ?? 0).join(" ")}`;
  }

  showAdapters(adapters) {
    $("adapters").hidden = adapters === null;
    if (adapters === null) return;
    const { running, waiting, loaded } = adapters;
    const names = (list) => list.join(", ") || "none";
    $("adapters").lastElementChild.replaceChildren(
      element("li", {}, `Of running requests: ${names(running)}`),
      element("li", {}, `Of waiting requests: ${names(waiting)}`),
      element("li", {}, `In host memory: ${loaded}`),
    );
  }

  /** One line for each replica: what it does, and how many requests it has. */
  async readReplicas() {
    let load;
    try {
      load = await (await request("load")).json();
    } catch {
      return; // the other looks say what is wrong
    }
    $("replicas").hidden = false;
    $("replicas").lastElementChild.replaceChildren(
      ...load.replicas.map((replica) => {
        const requests = `${replica.server_load} request${replica.server_load === 1 ? "" : "s"}`;
        const cache = share(replica.kv_cache_usage).join(" ");
        const words = `Replica ${replica.engine}: ${replica.state}, ${requests}, KV cache ${cache}`;
        return element("li", { "data-state": replica.state }, words);
      }),
    );
  }
}
