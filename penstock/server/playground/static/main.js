// Puts the page together: the model's name, the views, the composer, the keyboard.

import { request } from "./api.js";
import { Attachments } from "./attachments.js";
import { Chat } from "./chat.js";
import { Dashboard } from "./dashboard.js";
import { History } from "./history.js";
import { KeyDialog } from "./key.js";
import { Pooling } from "./pooling.js";
import { Settings } from "./settings.js";
import { Shortcuts } from "./shortcuts.js";
import { Store } from "./store.js";

const $ = (id) => document.getElementById(id);
const prompt = $("prompt");
let cards = []; // what /v1/models says of each name

// -- the server

async function loadModels() {
  const { data } = await (await request("v1/models")).json();
  showModels(data);
  document.title = `${data[0].id} · Penstock`;
  if (!data[0].tasks.includes("generate")) showPooling(data[0]);
  else await settings.explain();
}

/** The model's own names, and below them its adapters. Keeps what is chosen. */
function showModels(data) {
  cards = data;
  const chosen = $("model").value;
  const names = (some) => some.map((card) => new Option(card.id, card.id, false, card.id === chosen));
  const adapters = document.createElement("optgroup");
  adapters.label = "Adapters";
  adapters.append(...names(data.filter((card) => card.parent)));
  $("model").replaceChildren(...names(data.filter((card) => !card.parent)));
  if (adapters.children.length) $("model").append(adapters);
  $("model").disabled = data.length < 2;
  $("attach").hidden = !takesImages();
}

function takesImages() {
  return cards.find((card) => card.id === $("model").value)?.takes_images ?? false;
}

/** Adapters come and go while the page is open. Before the first list, nothing is asked for. */
async function refreshModels() {
  if (!cards.length) return;
  const { data } = await (await request("v1/models")).json();
  const shown = cards.map((card) => card.id);
  if (data.map((card) => card.id).join("\n") !== shown.join("\n")) showModels(data);
}

/** A pooling model has no chat and no sampling settings, and its charts none of generation. */
function showPooling({ tasks, labels }) {
  document.body.classList.add("pools");
  $("main-button").textContent = "Playground";
  for (const id of ["chat", "settings", "settings-button", "history"]) $(id).hidden = true;
  document.querySelector("nav [data-view=history]").hidden = true;
  pooling.show(tasks, labels ?? []);
  $("skip").textContent = "Skip to the playground";
  $("skip").href = "#pooling";
}

function onError(error) {
  keyDialog.askAbout(error);
}

function showState(state, words) {
  if ($("status").textContent !== words) $("status").textContent = words;
  if (state === "ready" && $("status").dataset.state !== "ready" && !cards.length) {
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

/** The settings are beside the chat, or a view of their own in a narrow window. */
function showSettings() {
  const isBeside = getComputedStyle($("settings-button")).display === "none";
  showView(isBeside ? "chat" : "settings");
}

function focusPrompt() {
  showView("chat");
  prompt.focus();
}

function growPrompt() {
  if (CSS.supports("field-sizing", "content")) return;
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}

function send() {
  const images = attachments.take();
  if (!chat.send(prompt.value, images)) {
    attachments.put(images);
    return;
  }
  prompt.value = "";
  growPrompt();
}

/** Click a button of the last message that has one. */
function press(selector) {
  [...document.querySelectorAll(`#messages ${selector}`)].at(-1)?.click();
}

const settings = new Settings({ form: $("options"), onInvalid: showSettings });
const chat = new Chat({
  readOptions: () => {
    const fields = settings.read();
    return fields && { model: $("model").value || undefined, ...fields };
  },
  onChange: (conversation) => history.changed(conversation).catch((error) => history.say(`Not kept: ${error.message}`)),
  onError,
});
const history = new History({ store: new Store(), chat, onOpen: focusPrompt });
const attachments = new Attachments({ getIsTaken: takesImages });
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
const shortcuts = new Shortcuts([
  { key: "?", words: "Show these shortcuts", run: () => shortcuts.open() },
  { key: "/", words: "Write a message", run: focusPrompt },
  { key: "n", words: "Begin a new chat", run: () => history.begin() },
  { key: "e", words: "Edit your last message", run: () => press(".edit") },
  { key: "r", words: "Regenerate the last answer", run: () => press(".regenerate") },
  { key: "c", words: "Show the chat", run: focusPrompt },
  { key: "s", words: "Show the server's charts", run: () => showView("server") },
  { key: "t", words: "Change the theme", run: () => $("theme-button").click() },
]);
history.load().catch((error) => history.say(error.message));
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
  if (event.key === "Escape" && !event.isComposing && !document.querySelector("dialog[open]")) chat.stop();
});
$("stop").addEventListener("click", () => {
  chat.stop();
  prompt.focus();
});
$("shortcuts-button").addEventListener("click", () => shortcuts.open());
for (const button of document.querySelectorAll("#suggestions button")) {
  button.addEventListener("click", () => chat.send(button.textContent));
}
for (const button of document.querySelectorAll("nav button")) {
  button.addEventListener("click", () => showView(button.dataset.view));
}
$("model").addEventListener("focus", () => refreshModels().catch(onError));
$("model").addEventListener("change", () => ($("attach").hidden = !takesImages()));
