// Reads Prometheus's text format, and turns its counters into what happened between two looks.

// --metrics-prefix may be another one. It is what stands before this metric, which is always there.
const prefixOf = (text) => /^([\w:]*?)num_requests_running\{/m.exec(text)?.[1] ?? "penstock:";

const SHARES = ["kv_cache_usage_perc"];
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/**
 * Values by name without prefix, summed over labels; the mean of shares. `buckets` has those of
 * histograms, by name and upper bound.
 */
export function parseMetrics(text) {
  const values = new Map();
  const counts = new Map();
  const buckets = new Map();
  const prefix = prefixOf(text);
  for (const line of text.split("\n")) {
    if (!line.startsWith(prefix)) continue;
    const nameEnd = line.search(/[{ ]/);
    const name = line.slice(prefix.length, nameEnd);
    const value = Number(line.slice(line.lastIndexOf(" ") + 1));
    if (name.endsWith("_bucket")) {
      const bound = Number(/le="([^"]*)"/.exec(line)[1].replace("+Inf", "Infinity"));
      const histogram = name.slice(0, -"_bucket".length);
      if (!buckets.has(histogram)) buckets.set(histogram, new Map());
      const bounds = buckets.get(histogram);
      bounds.set(bound, (bounds.get(bound) ?? 0) + value);
      continue;
    }
    values.set(name, (values.get(name) ?? 0) + value);
    counts.set(name, (counts.get(name) ?? 0) + 1);
  }
  for (const name of SHARES) {
    if (values.has(name)) values.set(name, values.get(name) / counts.get(name));
  }
  return { values, buckets };
}

/** How many engines there are. */
export function engines(text) {
  return (text.match(/^[\w:]*num_requests_running\{/gm) ?? []).length;
}

/** Whether the engine says that its model needs no KV cache. */
export function hasNoCache(text) {
  return /^[\w:]*cache_config_info\{[^}]*num_gpu_blocks="[01]"/m.test(text);
}

/** The adapters of running and of waiting requests, and how many are in memory; null without any. */
export function adaptersOf(text, values) {
  if (!/^[\w:]*lora_requests_info\{/m.test(text)) return null;
  const named = { running: new Set(), waiting: new Set() };
  const newest = new Map(); // the labels of each engine that were set last
  for (const [line] of text.matchAll(/^[\w:]*lora_requests_info\{.*$/gm)) {
    const labels = Object.fromEntries([...line.matchAll(LABEL)].map(([, name, value]) => [name, value]));
    const at = Number(line.slice(line.lastIndexOf(" ") + 1));
    if (at >= (newest.get(labels.engine)?.at ?? 0)) newest.set(labels.engine, { at, labels });
  }
  for (const { labels } of newest.values()) {
    for (const [state, names] of Object.entries(named)) {
      for (const name of (labels[`${state}_lora_adapters`] ?? "").split(",").filter(Boolean)) names.add(name);
    }
  }
  return { running: [...named.running], waiting: [...named.waiting], loaded: values.get("lora_host_adapters") ?? 0 };
}

/** One point of each chart, from two looks `seconds` apart; null where nothing can be said. */
export function pointBetween(before, after, seconds) {
  const get = (name) => after.get(name) ?? 0;
  const grown = (name) => {
    const more = get(name) - (before?.get(name) ?? 0);
    return more < 0 ? get(name) : more; // the server was started anew
  };
  const rate = (name) => (before ? grown(name) / seconds : null);
  const ratio = (part, whole) => (before && grown(whole) > 0 ? grown(part) / grown(whole) : null);
  const accepted = ratio("spec_decode_num_accepted_tokens_total", "spec_decode_num_drafts_total");
  return {
    running: get("num_requests_running"),
    waiting: get("num_requests_waiting"),
    kv: get("kv_cache_usage_perc"),
    generation: rate("generation_tokens_total"),
    prompt: rate("prompt_tokens_total"),
    prefix: ratio("prefix_cache_hits_total", "prefix_cache_queries_total"),
    drafts: ratio("spec_decode_num_accepted_tokens_total", "spec_decode_num_draft_tokens_total"),
    acceptance: accepted === null ? null : 1 + accepted,
  };
}

/** A quantile of what a histogram counted between two looks, as Prometheus computes it. */
export function quantileBetween(before, after, name, share) {
  const bounds = [...(after.get(name) ?? new Map()).keys()].sort((a, b) => a - b);
  const counted = bounds.map((bound) => after.get(name).get(bound) - (before?.get(name)?.get(bound) ?? 0));
  const total = counted.at(-1) ?? 0;
  if (!before || !(total > 0)) return null;
  const rank = share * total;
  const index = counted.findIndex((count) => count >= rank);
  const low = index > 0 ? bounds[index - 1] : 0;
  if (bounds[index] === Infinity) return low;
  const below = index > 0 ? counted[index - 1] : 0;
  return low + (bounds[index] - low) * ((rank - below) / (counted[index] - below || 1));
}
