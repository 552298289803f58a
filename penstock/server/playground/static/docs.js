// Shows what /openapi.json says about the API, and lets each operation be tried.

import { getKey, request } from "./api.js";
import { download, element } from "./element.js";
import { KeyDialog } from "./key.js";

const $ = (id) => document.getElementById(id);
const METHODS = ["get", "post", "put", "patch", "delete"];
const JSON_TYPE = "application/json";
const EXAMPLES = {
  "/v1/chat/completions": {
    messages: [{ role: "user", content: "Why is the sky blue?" }], max_tokens: 32, stream: true,
  },
  "/v1/completions": { prompt: "The sky is", max_tokens: 16 },
  "/tokenize": { prompt: "The sky is blue." },
  "/detokenize": { tokens: [1, 2, 3] },
};
let spec = null;

// -- schemas

function nameOf(ref) {
  return ref.split("/").pop();
}

function resolve(schema) {
  return schema.$ref ? spec.components.schemas[nameOf(schema.$ref)] : schema;
}

/** A schema in words: text, and links to the schemas that have names. */
function typeOf(schema) {
  if (schema.$ref) {
    const name = nameOf(schema.$ref);
    return [element("a", { href: `#schema-${name}` }, name)];
  }
  if (schema.const !== undefined) return [JSON.stringify(schema.const)];
  if (schema.enum) return [schema.enum.map((value) => JSON.stringify(value)).join(" or ")];
  const members = schema.anyOf ?? schema.oneOf ?? schema.allOf;
  if (members) return members.flatMap((member, i) => [...(i ? [" or "] : []), ...typeOf(member)]);
  if (schema.type === "array") return ["list of ", ...typeOf(schema.items ?? {})];
  if (schema.type === "object" && typeof schema.additionalProperties === "object") {
    return ["object of ", ...typeOf(schema.additionalProperties)];
  }
  return [schema.type ?? "anything"];
}

const LIMITS = {
  default: "default", minimum: "at least", exclusiveMinimum: "above", maximum: "at most",
  exclusiveMaximum: "below", minLength: "characters: at least", maxLength: "characters: at most",
  minItems: "items: at least", maxItems: "items: at most", pattern: "pattern",
};

function limitsOf(schema) {
  return Object.entries(LIMITS)
    .filter(([key]) => schema[key] !== undefined)
    .map(([key, words]) => `${words} ${JSON.stringify(schema[key])}`)
    .join(", ");
}

function field(name, schema, isRequired, description) {
  const about = [description ?? schema.description, limitsOf(schema)].filter(Boolean).join(" · ");
  return element(
    "div", {},
    element(
      "dt", {}, name, " ", element("span", { class: "type" }, ...typeOf(schema)),
      ...(isRequired ? [" ", element("span", { class: "must" }, "required")] : []),
    ),
    element("dd", {}, about),
  );
}

function fieldsOf(schema) {
  const whole = resolve(schema);
  if (!whole.properties) return element("p", {}, ...typeOf(whole));
  const required = new Set(whole.required ?? []);
  const rows = Object.entries(whole.properties).map(([name, inner]) =>
    field(name, inner, required.has(name)));
  return element("dl", { class: "fields" }, ...rows);
}

function schemaEntry(name, schema) {
  return element(
    "details", { class: "entry", id: `schema-${name}` },
    element("summary", {}, element("code", {}, name)),
    ...(schema.description ? [element("p", { class: "prose" }, schema.description)] : []),
    fieldsOf(schema),
  );
}

// -- operations

function responseRows(responses) {
  return Object.entries(responses).map(([status, response]) => {
    const types = Object.entries(response.content ?? {}).flatMap(([type, { schema }]) => [
      " ", element("span", { class: "type" }, type, " ", ...(schema?.$ref ? typeOf(schema) : [])),
    ]);
    return element(
      "div", {}, element("dt", {}, status, ...types), element("dd", {}, response.description ?? ""),
    );
  });
}

function part(title, content) {
  return [element("h3", {}, title), content];
}

function operationEntry(path, method, operation, id) {
  const parameters = operation.parameters ?? [];
  const body = operation.requestBody?.content?.[JSON_TYPE]?.schema;
  const entry = element(
    "details", { class: "entry", id },
    element(
      "summary", {}, element("span", { class: "method" }, method.toUpperCase()),
      element("code", {}, path), " ",
      element("span", { class: "brief" }, operation.description ?? operation.summary ?? ""),
    ),
  );
  if (parameters.length) {
    const rows = parameters.map((item) =>
      field(`${item.name} (${item.in})`, item.schema ?? {}, item.required, item.description));
    entry.append(...part("Parameters", element("dl", { class: "fields" }, ...rows)));
  }
  if (body) {
    entry.append(...part("Body", element("p", {}, ...typeOf(body))), fieldsOf(body));
  }
  const answers = element("dl", { class: "fields" }, ...responseRows(operation.responses ?? {}));
  entry.append(...part("Answers", answers), tryForm(path, method, parameters, body));
  return entry;
}

function exampleOf(path, schema) {
  if (EXAMPLES[path]) return EXAMPLES[path];
  const whole = resolve(schema);
  const pairs = (whole.required ?? []).map((name) => [name, whole.properties[name].default ?? ""]);
  return Object.fromEntries(pairs);
}

// -- trying them

function tryForm(path, method, parameters, body) {
  const inputs = parameters.map((item) => [item, element("input", { name: item.name })]);
  const text = body ? element("textarea", { rows: "8", spellcheck: "false" }) : null;
  if (text) text.value = JSON.stringify(exampleOf(path, body), null, 2);
  const answer = element("pre", { class: "answer", tabindex: "0", "aria-live": "polite", hidden: "" });
  const form = element(
    "form", { class: "try" }, element("h3", {}, "Try it"),
    ...inputs.map(([item, input]) => element("label", {}, item.name, input)),
    ...(text ? [element("label", {}, "Body", text)] : []),
    element("button", { type: "submit" }, "Send"), answer,
  );
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    answer.hidden = false;
    answer.textContent = "";
    const query = new URLSearchParams();
    let target = path.slice(1); // relative, as a proxy may serve this under a path of its own
    for (const [item, input] of inputs) {
      if (item.in === "path") {
        // A model's name may contain slashes, which are part of the path.
        const value = input.value.split("/").map(encodeURIComponent).join("/");
        target = target.replace(`{${item.name}}`, value).replace(`{${item.name}:path}`, value);
      } else if (input.value) query.set(item.name, input.value);
    }
    if (String(query)) target += `?${query}`;
    await show(answer, target, method, text?.value);
  });
  return form;
}

/** The status, then the body as it comes, which may be a stream. */
async function show(answer, target, method, body) {
  const headers = body === undefined ? {} : { "Content-Type": JSON_TYPE };
  if (getKey()) headers.Authorization = `Bearer ${getKey()}`;
  try {
    const response = await fetch(target, { method: method.toUpperCase(), headers, body });
    answer.textContent = `${response.status} ${response.statusText}\n\n`;
    const isJson = (response.headers.get("Content-Type") ?? "").startsWith(JSON_TYPE);
    if (isJson) {
      answer.textContent += JSON.stringify(await response.json(), null, 2);
      return;
    }
    if (!response.body) return;
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let chunk = await reader.read(); !chunk.done; chunk = await reader.read()) {
      answer.textContent += chunk.value;
    }
  } catch (error) {
    answer.textContent += `The server cannot be reached, or the connection broke: ${error.message}`;
  }
}

// -- the page

async function load() {
  spec = await (await request("openapi.json")).json();
  $("version").textContent = spec.info.version;
  $("about").textContent = spec.info.description ?? "";
  const groups = new Map();
  const links = [];
  for (const [path, item] of Object.entries(spec.paths)) {
    for (const method of Object.keys(item).filter((name) => METHODS.includes(name))) {
      const operation = item[method];
      const tag = operation.tags?.[0] ?? "Other";
      const id = `${method}${path.replace(/[^a-zA-Z0-9]+/g, "-")}`;
      if (!groups.has(tag)) groups.set(tag, []);
      groups.get(tag).push(operationEntry(path, method, operation, id));
      links.push(element("a", { href: `#${id}` }, `${method.toUpperCase()} ${path}`));
    }
  }
  $("contents").replaceChildren(...links);
  $("operations").replaceChildren(
    ...[...groups].flatMap(([tag, entries]) => [element("h2", {}, tag), ...entries]),
  );
  const schemas = Object.entries(spec.components?.schemas ?? {});
  $("schemas").replaceChildren(
    element("h2", {}, "Schemas"), ...schemas.map(([name, schema]) => schemaEntry(name, schema)),
  );
  $("state").textContent = "";
  openTarget();
}

/** Unfold what the address points to. */
function openTarget() {
  const target = $(decodeURIComponent(location.hash.slice(1)));
  if (target?.tagName !== "DETAILS") return;
  target.open = true;
  target.scrollIntoView();
}

function onError(error) {
  $("state").textContent = error.message;
  keyDialog.askAbout(error);
}

const keyDialog = new KeyDialog({
  check: load,
  onAccepted: () => $("contents").firstChild?.focus(),
});
addEventListener("hashchange", openTarget);
// A link cannot send a key, so what was fetched with one is saved.
$("raw").addEventListener("click", (event) => {
  if (!spec) return;
  event.preventDefault();
  download(JSON.stringify(spec, null, 2), "openapi.json", JSON_TYPE);
});
load().catch(onError);
