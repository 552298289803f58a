// The playground of pooling models: similarities of texts, classes, reranked documents.

import { post } from "./api.js";
import { element } from "./element.js";

const MAX_COMPARED = 40; // a matrix of more is not readable
const MAX_LABELS = 10;

const $ = (id) => document.getElementById(id);

export class Pooling {
  /** `getModel` gives the name that requests are for. */
  constructor({ getModel, onError }) {
    this.getModel = getModel;
    this.labels = [];
    const run = { onError };
    new Panel({ ...run, form: $("similarity"), ask: (...args) => this.compare(...args) });
    new Panel({ ...run, form: $("classify"), ask: (...args) => this.classify(...args) });
    new Panel({ ...run, form: $("rerank"), ask: (...args) => this.rerank(...args) });
  }

  /** Show what a model with these tasks can be asked for. */
  show(tasks, labels) {
    this.labels = labels;
    let isAny = false;
    for (const section of document.querySelectorAll("#pooling [data-task]")) {
      section.hidden = !tasks.includes(section.dataset.task);
      isAny ||= !section.hidden;
    }
    $("no-playground").hidden = isAny;
    $("pooling").hidden = false;
  }

  focus() {
    document.querySelector("#pooling section:not([hidden]) :is(textarea, input)")?.focus();
  }

  async compare({ texts }, signal) {
    const input = linesOf(texts, 2);
    if (input.length > MAX_COMPARED) {
      throw new FieldError(`The matrix has room for ${MAX_COMPARED} lines, and these are ${input.length}.`, texts);
    }
    const { data, usage } = await post("v1/embeddings", { model: this.getModel(), input }, signal);
    const vectors = data.map((item) => item.embedding);
    const cosines = vectors.map((one) => vectors.map((other) => cosine(one, other)));
    return {
      content: [matrix(input, cosines)],
      facts: [`${vectors[0].length} dimensions`, tokens(usage)],
    };
  }

  async classify({ texts }, signal) {
    const input = linesOf(texts, 1);
    const { data, usage } = await post("classify", { model: this.getModel(), input }, signal);
    const results = data.map(({ probs }, index) => element("section", {}, element("h3", {}, input[index]), this.classes(probs)));
    return { content: results, facts: [tokens(usage)] };
  }

  /** The labels, the most probable first. */
  classes(probs) {
    const order = probs.map((_, index) => index).sort((a, b) => probs[b] - probs[a]);
    const rows = order.slice(0, MAX_LABELS).map((index) => bar(this.labels[index] ?? `Label ${index}`, probs[index]));
    const numMore = order.length - rows.length;
    if (numMore > 0) rows.push(element("li", { class: "more" }, `and ${numMore} more`));
    return element("ol", { class: "bars" }, ...rows);
  }

  async rerank({ query, documents }, signal) {
    if (!query.value.trim()) throw new FieldError("Write a query.", query);
    const body = { model: this.getModel(), query: query.value, documents: linesOf(documents, 1) };
    const { results, usage } = await post("rerank", body, signal);
    const rows = results.map(({ index, relevance_score }) => bar(body.documents[index], relevance_score));
    return { content: [element("ol", { class: "bars" }, ...rows)], facts: [tokens(usage)] };
  }
}

/** Something to correct in a field. */
class FieldError extends Error {
  constructor(message, field) {
    super(message);
    this.field = field;
  }
}

/** A form, and what it was answered with. Of two answers, the one that was asked for last is shown. */
class Panel {
  /** `ask` takes the form's fields and a signal, and gives {content, facts}. */
  constructor({ form, ask, onError }) {
    Object.assign(this, { form, ask, onError, abort: null });
    this.result = form.parentElement.querySelector(".result");
    this.facts = form.parentElement.querySelector(".facts"); // read aloud; the result need not be
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.run();
    });
    form.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
      event.preventDefault();
      form.requestSubmit();
    });
  }

  async run() {
    this.abort?.abort();
    const abort = (this.abort = new AbortController());
    const startedAt = performance.now();
    this.result.setAttribute("aria-busy", "true");
    let shown;
    let said = "";
    try {
      const { content, facts } = await this.ask(this.form.elements, abort.signal);
      const seconds = ((performance.now() - startedAt) / 1000).toFixed(2);
      shown = content;
      said = [...facts, `${seconds} s`].join(" · ");
    } catch (error) {
      if (error.name === "AbortError") return; // asked anew
      shown = [element("p", { class: "fault", role: "alert" }, error.message)];
      if (error.field) error.field.focus();
      else this.onError(error);
    }
    if (this.abort !== abort) return;
    this.result.replaceChildren(...shown);
    this.facts.textContent = said;
    this.result.removeAttribute("aria-busy");
  }
}

function linesOf(field, least) {
  const lines = field.value.split("\n").map((line) => line.trim()).filter(Boolean);
  if (lines.length < least) throw new FieldError(least === 1 ? "Write at least one line." : "Write at least two lines.", field);
  return lines;
}

function cosine(one, other) {
  let product = 0;
  let first = 0;
  let second = 0;
  for (let i = 0; i < one.length; i++) {
    product += one[i] * other[i];
    first += one[i] * one[i];
    second += other[i] * other[i];
  }
  return product / Math.sqrt(first * second);
}

function tokens({ total_tokens: count }) {
  return count === 1 ? "1 token" : `${count} tokens`;
}

function number(value, digits) {
  const text = value.toFixed(digits);
  return Number(text) === 0 ? (0).toFixed(digits) : text.replace("-", "−");
}

/** A table of all pairs, which scrolls by itself where it is too wide. */
function matrix(lines, values) {
  const heads = lines.map((line, index) => element("th", { scope: "col", title: line, "aria-label": `${index + 1}: ${line}` }, String(index + 1)));
  const rows = lines.map((line, row) => {
    const cells = values[row].map((value) => {
      const cell = element("td", { class: value < 0 ? "negative" : "" }, Number.isNaN(value) ? "–" : number(value, 2));
      cell.style.setProperty("--share", Math.min(Math.abs(value) || 0, 1));
      return cell;
    });
    const name = element("span", { class: "line" }, line);
    return element("tr", {}, element("th", { scope: "row", title: line }, `${row + 1} `, name), ...cells);
  });
  const table = element(
    "table", {}, element("caption", { class: "hidden" }, "Cosine similarity of each pair of lines"),
    element("thead", {}, element("tr", {}, element("td"), ...heads)), element("tbody", {}, ...rows),
  );
  return element("div", { class: "matrix", tabindex: "0", role: "region", "aria-label": "Similarity matrix" }, table);
}

/** A text with its score, and a bar as long as the score is of 1. */
function bar(text, score) {
  const row = element("li", {}, element("span", { class: "text" }, text), element("span", { class: "score" }, number(score, 4)));
  row.style.setProperty("--share", Math.min(Math.max(score, 0), 1));
  return row;
}
