// The dialog of both pages that asks for the server's API key.

import { getKey, setKey } from "./api.js";

const $ = (id) => document.getElementById(id);

const DIALOG = `
<dialog id="key-dialog" aria-labelledby="key-title">
  <form id="key-form" method="dialog">
    <h2 id="key-title">API key</h2>
    <p id="key-reason">This server requires an API key. The key is kept until you close this tab.</p>
    <label>Key <input id="key" type="password" autocomplete="off" spellcheck="false"></label>
    <p class="error" id="key-error" role="alert"></p>
    <div class="buttons">
      <button type="button" id="key-cancel" class="quiet">Cancel</button>
      <button type="submit">Use this key</button>
    </div>
  </form>
</dialog>`;

export class KeyDialog {
  /** `check` asks the server for something with the key that was given; it may fail. */
  constructor({ check, onAccepted }) {
    document.body.insertAdjacentHTML("beforeend", DIALOG);
    this.dialog = $("key-dialog");
    $("key-button").addEventListener("click", () => this.ask());
    $("key-cancel").addEventListener("click", () => this.dialog.close());
    $("key-form").addEventListener("submit", async (event) => {
      event.preventDefault();
      setKey($("key").value.trim());
      try {
        await check();
        this.dialog.close();
        onAccepted();
      } catch (error) {
        $("key-error").textContent = error.message;
      }
    });
  }

  get isOpen() {
    return this.dialog.open;
  }

  ask(error = "") {
    if (this.isOpen) return;
    $("key").value = getKey();
    $("key-error").textContent = error;
    this.dialog.showModal();
  }

  /** Asks if `error` is about the key; whether it is. */
  askAbout(error) {
    if (error.status !== 401) return false;
    this.ask(getKey() ? "The server does not know this key." : "");
    return true;
  }
}
