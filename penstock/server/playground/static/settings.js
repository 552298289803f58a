// The settings of requests. What a parameter means is what the API's schema says.

import { request } from "./api.js";
import { element } from "./element.js";

const KEPT = "penstock-options";
// Names of /v1/chat/completions. The ranges are those that make sense by hand.
const PARAMETERS = [
  { name: "temperature", min: 0, max: 2, step: 0.05, value: 0.7 },
  { name: "top_p", min: 0.01, max: 1, step: 0.01, value: 0.95 },
  { name: "top_k", min: -1, step: 1 },
  { name: "min_p", min: 0, max: 1, step: 0.01 },
  { name: "max_tokens", min: 1, step: 1, value: 512 },
  { name: "seed", min: 0, step: 1 },
  { name: "repetition_penalty", min: 0.01, max: 100, step: 0.01 },
  { name: "presence_penalty", min: -2, max: 2, step: 0.1 },
  { name: "frequency_penalty", min: -2, max: 2, step: 0.1 },
  { name: "thinking_token_budget", min: -1, step: 1 },
];
const EFFORTS = ["", "none", "minimal", "low", "medium", "high"];
const CHOICES = ["", "auto", "required", "none"];

export class Settings {
  /** `onInvalid` is told before the field that is not valid is shown. */
  constructor({ form, onInvalid }) {
    Object.assign(this, { form, onInvalid });
    const place = form.querySelector("#parameters");
    place.append(...PARAMETERS.map(numberRow), choiceRow("reasoning_effort", EFFORTS));
    form.querySelector("#tool-choice").append(choiceRow("tool_choice", CHOICES));
    const kept = JSON.parse(localStorage.getItem(KEPT) ?? "{}");
    for (const [name, value] of Object.entries(kept)) {
      if (form.elements[name]) form.elements[name].value = value;
    }
    form.addEventListener("input", () => {
      this.check();
      localStorage.setItem(KEPT, JSON.stringify(Object.fromEntries(new FormData(form))));
    });
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("reset", () => {
      localStorage.removeItem(KEPT);
      setTimeout(() => this.check());
    });
    this.check();
  }

  /** Put what the schema says below each field. */
  async explain() {
    let response;
    try {
      response = await request("openapi.json");
    } catch (error) {
      if (error.status === 404) return; // this server does not show its schema
      throw error;
    }
    const { components } = await response.json();
    const { properties } = components.schemas.ChatCompletionRequest;
    for (const place of this.form.querySelectorAll("[data-explains]")) {
      place.textContent = properties[place.dataset.explains]?.description ?? "";
    }
  }

  check() {
    for (const [name, isRight, wanted] of [
      ["schema", (value) => isObject(value) || typeof value === "boolean", "a JSON schema"],
      ["tools", (value) => Array.isArray(value) && value.every(isObject), "a JSON list of tools"],
    ]) {
      const field = this.form.elements[name];
      const value = parse(field.value);
      const isGood = !field.value.trim() || (value !== undefined && isRight(value));
      field.setCustomValidity(isGood ? "" : `This must be ${wanted}.`);
    }
  }

  /** What the form says, as fields of a request; null, and the form says why, if it is not valid. */
  read() {
    if (!this.form.checkValidity()) {
      this.onInvalid();
      this.form.reportValidity();
      return null;
    }
    const given = Object.fromEntries([...new FormData(this.form)].filter(([, value]) => value.trim()));
    const { system, schema, tools, tool_choice: choice, stop, reasoning_effort: effort, ...numbers } = given;
    const fields = Object.fromEntries(Object.entries(numbers).map(([name, value]) => [name, Number(value)]));
    if (system) fields.system = system;
    if (stop) fields.stop = stop.split("\n").filter(Boolean);
    if (effort) fields.reasoning_effort = effort;
    if (schema) {
      const format = { name: "answer", schema: parse(schema) };
      fields.response_format = { type: "json_schema", json_schema: format };
    }
    if (tools) {
      fields.tools = parse(tools).map((tool) => (tool.type ? tool : { type: "function", function: tool }));
      if (choice) fields.tool_choice = choice;
    }
    return fields;
  }
}

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

function parse(text) {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

const labelOf = (name) => name[0].toUpperCase() + name.slice(1).replaceAll("_", " ");

function row(name, field) {
  const id = `about-${name}`;
  field.setAttribute("aria-describedby", id);
  const label = element("label", {}, element("span", {}, labelOf(name)), field);
  return element("div", { class: "parameter" }, label, element("p", { id, "data-explains": name }));
}

function numberRow({ name, ...attributes }) {
  const inputmode = attributes.step < 1 ? "decimal" : "numeric";
  return row(name, element("input", { name, type: "number", inputmode, ...attributes }));
}

function choiceRow(name, choices) {
  return row(name, element("select", { name }, ...choices.map((choice) => new Option(choice || "default", choice))));
}
