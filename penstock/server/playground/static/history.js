// The list of conversations kept in this browser: open, delete, export, import.

import { Conversation, readExport, writeExport } from "./conversation.js";
import { button, download, element } from "./element.js";

const $ = (id) => document.getElementById(id);

export class History {
  /** `chat` shows the conversation that is chosen; `onOpen` is told that one was. */
  constructor({ store, chat, onOpen }) {
    Object.assign(this, { store, chat, onOpen });
    this.conversations = [];
    $("new-chat").addEventListener("click", () => this.begin());
    $("export").addEventListener("click", () => this.save());
    $("import").addEventListener("click", () => $("import-file").click());
    $("import-file").addEventListener("change", async () => {
      const [file] = $("import-file").files;
      if (file) await this.read(await file.text());
      $("import-file").value = "";
    });
  }

  async load() {
    const kept = await this.store.all();
    const known = new Set(this.conversations.map(({ id }) => id)); // begun while these were read
    this.conversations.push(...kept.filter(({ id }) => !known.has(id)));
    this.show();
    if (!(await this.store.isKept())) this.say("This browser keeps no conversations: they last until the page is closed.");
  }

  begin() {
    this.chat.open(new Conversation());
    this.show();
    this.onOpen();
  }

  /** A conversation has changed: it comes first, and is kept. */
  async changed(conversation) {
    this.conversations = [conversation, ...this.conversations.filter((other) => other !== conversation)];
    this.show();
    await this.store.put(conversation);
  }

  async remove(conversation) {
    if (!confirm(`Delete "${conversation.title}"?`)) return;
    this.conversations = this.conversations.filter((other) => other !== conversation);
    if (this.chat.conversation === conversation) this.chat.open(new Conversation());
    this.show();
    $("new-chat").focus();
    await this.store.remove(conversation);
  }

  save() {
    download(writeExport(this.conversations), "penstock-conversations.json", "application/json");
  }

  /** Add the conversations of an export; one that is here already is replaced. */
  async read(text) {
    let read;
    try {
      read = readExport(text);
    } catch (error) {
      this.say(error.message);
      return;
    }
    const ids = new Set(read.map(({ id }) => id));
    const others = this.conversations.filter(({ id }) => !ids.has(id));
    this.conversations = [...read, ...others].sort((a, b) => b.updatedAt - a.updatedAt);
    if (ids.has(this.chat.conversation.id)) this.chat.open(read.find(({ id }) => id === this.chat.conversation.id));
    this.show();
    for (const conversation of read) await this.store.put(conversation);
    this.say(read.length === 1 ? "1 conversation imported." : `${read.length} conversations imported.`);
  }

  say(words) {
    $("history-note").textContent = words;
  }

  show() {
    $("export").disabled = !this.conversations.length;
    $("conversations").replaceChildren(
      ...this.conversations.map((conversation) => {
        const isShown = conversation === this.chat.conversation;
        const open = () => {
          this.chat.open(conversation);
          this.show();
          this.onOpen();
        };
        return element(
          "li", {},
          button(conversation.title, open, { class: "quiet title", "aria-current": isShown ? "true" : null, title: conversation.title }),
          button("×", () => this.remove(conversation), { "aria-label": `Delete ${conversation.title}` }),
        );
      }),
    );
  }
}
