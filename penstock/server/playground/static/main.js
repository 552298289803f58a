// Puts the page together: the model's name, the settings, the key, the keyboard.

import { request } from "./api.js";
import { Chat } from "./chat.js";
import { Dashboard } from "./dashboard.js";
import { KeyDialog } from "./key.js";
import { Pooling } from "./pooling.js";

const $ = (id) => document.getElementById(id);
const OPTIONS = "penstock-options";
const options = $("options");
const prompt = $("prompt");

// -- settings

/** What the form says, as fields of a request; null, and the form says why, if it is not valid. */
function readOptions() {
  if (!options.checkValidity()) {
    showView("settings");
    options.reportValidity();
    return null;
  }
  const fields = { model: $("model").value || undefined };
  for (const [name, value] of new FormData(options)) {
    if (value.trim() !== "") fields[name] = name === "system" ? value : Number(value);
  }
  return fields;
}

function restoreOptions() {
  const kept = JSON.parse(sessionStorage.getItem(OPTIONS) ?? "{}");
  for (const [name, value] of Object.entries(kept)) {
    if (options.elements[name]) options.elements[name].value = value;
  }
}

function keepOptions() {
  sessionStorage.setItem(OPTIONS, JSON.stringify(Object.fromEntries(new FormData(options))));
}

// -- the server

async function loadModels() {
  const { data } = await (await request("v1/models")).json();
  showModels(data);
  document.title = `${data[0].id} · Penstock`;
  if (!data[0].tasks.includes("generate")) showPooling(data[0]);
}

/** The model's own names, and below them its adapters. Keeps what is chosen. */
function showModels(data) {
  const chosen = $("model").value;
  const names = (cards) => cards.map((card) => new Option(card.id, card.id, false, card.id === chosen));
  const adapters = document.createElement("optgroup");
  adapters.label = "Adapters";
  adapters.append(...names(data.filter((card) => card.parent)));
  $("model").replaceChildren(...names(data.filter((card) => !card.parent)));
  if (adapters.children.length) $("model").append(adapters);
  $("model").disabled = data.length < 2;
}

/** Adapters come and go while the page is open. Before the first list, nothing is asked for. */
async function refreshModels() {
  if (!$("model").options.length) return;
  const { data } = await (await request("v1/models")).json();
  const shown = [...$("model").options].map((option) => option.value);
  if (data.map((card) => card.id).join("\n") !== shown.join("\n")) showModels(data);
}

/** A pooling model has no chat and no sampling settings, and its charts none of generation. */
function showPooling({ tasks, labels }) {
  document.body.classList.add("pools");
  $("main-button").textContent = "Playground";
  for (const id of ["chat", "settings", "settings-button"]) $(id).hidden = true;
  pooling.show(tasks, labels ?? []);
  $("skip").textContent = "Skip to the playground";
  $("skip").href = "#pooling";
}

function onError(error) {
  keyDialog.askAbout(error);
}

function showState(state, words) {
  if ($("status").textContent !== words) $("status").textContent = words;
  if (state === "ready" && $("status").dataset.state !== "ready" && !$("model").options.length) {
    loadModels().catch(onError);
  }
  $("status").dataset.state = state;
}

// -- the page

function showView(view) {
  document.body.dataset.view = view;
  for (const button of document.querySelectorAll("nav button")) {
    button.setAttribute("aria-pressed", String(button.dataset.view === view));
  }
}

function growPrompt() {
  if (CSS.supports("field-sizing", "content")) return;
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}

function send() {
  if (!chat.send(prompt.value)) return;
  prompt.value = "";
  growPrompt();
}

restoreOptions();
const chat = new Chat({ readOptions, onError });
const pooling = new Pooling({ getModel: () => $("model").value || undefined, onError });
const dashboard = new Dashboard({ onState: showState });
const keyDialog = new KeyDialog({
  check: loadModels,
  onAccepted: () => {
    dashboard.look();
    if ($("pooling").hidden) prompt.focus();
    else pooling.focus();
  },
});
loadModels().catch(onError);

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
prompt.addEventListener("input", growPrompt);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !event.isComposing && !keyDialog.isOpen) chat.stop();
});
$("stop").addEventListener("click", () => {
  chat.stop();
  prompt.focus();
});
$("clear").addEventListener("click", () => {
  chat.clear();
  prompt.focus();
});
for (const button of document.querySelectorAll("#suggestions button")) {
  button.addEventListener("click", () => chat.send(button.textContent));
}
for (const button of document.querySelectorAll("nav button")) {
  button.addEventListener("click", () => showView(button.dataset.view));
}
$("model").addEventListener("focus", () => refreshModels().catch(onError));
options.addEventListener("input", keepOptions);
options.addEventListener("submit", (event) => event.preventDefault());
options.addEventListener("reset", () => sessionStorage.removeItem(OPTIONS));
