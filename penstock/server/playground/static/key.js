// Asks for the server's key, in the dialog that both pages have.

import { getKey, setKey } from "./api.js";

const $ = (id) => document.getElementById(id);

export class KeyDialog {
  /** `check` asks the server for something with the key that was given; it may fail. */
  constructor({ check, onAccepted }) {
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
