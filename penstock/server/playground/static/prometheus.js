// Reads Prometheus's text format, and turns its counters into what happened between two looks.

// --metrics-prefix may be another one. It is what stands before this metric, which is always there.
const prefixOf = (text) => /^([\w:]*?)num_requests_running\{/m.exec(text)?.[1] ?? "penstock:";

const SHARES = ["kv_cache_usage_perc"];

/** Values by name without prefix, summed over labels; the mean of shares. Buckets are left out. */
export function parseMetrics(text) {
  const values = new Map();
  const counts = new Map();
  const prefix = prefixOf(text);
  for (const line of text.split("\n")) {
    if (!line.startsWith(prefix)) continue;
    const nameEnd = line.search(/[{ ]/);
    const name = line.slice(prefix.length, nameEnd);
    if (name.endsWith("_bucket")) continue;
    const value = Number(line.slice(line.lastIndexOf(" ") + 1));
    values.set(name, (values.get(name) ?? 0) + value);
    counts.set(name, (counts.get(name) ?? 0) + 1);
  }
  for (const name of SHARES) {
    if (values.has(name)) values.set(name, values.get(name) / counts.get(name));
  }
  return values;
}

/** How many engines there are. */
export function engines(text) {
  return (text.match(/^[\w:]*num_requests_running\{/gm) ?? []).length;
}

/** Whether the engine says that its model needs no KV cache. */
export function hasNoCache(text) {
  return /^[\w:]*cache_config_info\{[^}]*num_blocks="[01]"/m.test(text);
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
  return {
    running: get("num_requests_running"),
    waiting: get("num_requests_waiting"),
    kv: get("kv_cache_usage_perc"),
    generation: rate("generation_tokens_total"),
    prompt: rate("prompt_tokens_total"),
    firstToken: ratio("time_to_first_token_seconds_sum", "time_to_first_token_seconds_count"),
    prefix: ratio("prefix_cache_hits_total", "prefix_cache_queries_total"),
    drafts: ratio("spec_decode_num_accepted_tokens_total", "spec_decode_num_draft_tokens_total"),
  };
}
