// Keeps conversations in the browser, in IndexedDB: images are too large for localStorage.

import { Conversation } from "./conversation.js";

const NAME = "penstock";
const TABLE = "conversations";

/** Where the browser offers no database, conversations last as long as the page. */
export class Store {
  constructor() {
    this.database = open().catch(() => null);
  }

  async isKept() {
    return (await this.database) !== null;
  }

  /** All conversations, the newest first. */
  async all() {
    const items = (await this.run("readonly", (table) => table.getAll())) ?? [];
    return items.map((item) => new Conversation(item)).sort((a, b) => b.updatedAt - a.updatedAt);
  }

  async put(conversation) {
    await this.run("readwrite", (table) => table.put({ ...conversation }));
  }

  async remove(conversation) {
    await this.run("readwrite", (table) => table.delete(conversation.id));
  }

  async run(mode, ask) {
    const database = await this.database;
    if (database === null) return undefined;
    return done(ask(database.transaction(TABLE, mode).objectStore(TABLE)));
  }
}

function open() {
  const request = indexedDB.open(NAME, 1);
  request.onupgradeneeded = () => request.result.createObjectStore(TABLE, { keyPath: "id" });
  return done(request);
}

function done(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}
