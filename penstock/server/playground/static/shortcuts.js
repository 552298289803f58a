// The keyboard shortcuts, and the dialog that lists them. Letters need Alt: a letter alone may be
// what a screen reader or speech input sends.

import { element } from "./element.js";

export class Shortcuts {
  /** `actions`: [{key, words, run}]; a key is `?`, `/` or a letter to press with Alt. */
  constructor(actions) {
    this.actions = actions;
    this.dialog = document.getElementById("shortcuts");
    this.dialog.querySelector("dl").append(...actions.map(({ key, words }) => entry(keysOf(key), words)));
    document.addEventListener("keydown", (event) => this.press(event));
  }

  open() {
    this.dialog.showModal();
  }

  press(event) {
    if (event.isComposing || event.ctrlKey || event.metaKey || document.querySelector("dialog[open]")) return;
    const isTyping = event.target.matches("input, textarea, select");
    const found = this.actions.find(({ key }) =>
      key.length === 1 && /[a-z]/.test(key)
        ? event.altKey && event.code === `Key${key.toUpperCase()}`
        : !event.altKey && !isTyping && event.key === key,
    );
    if (!found) return;
    event.preventDefault();
    found.run();
  }
}

const keysOf = (key) => (/[a-z]/.test(key) ? ["Alt", key.toUpperCase()] : [key]);

function entry(keys, words) {
  return element("div", {}, element("dt", {}, ...keys.flatMap((key) => [element("kbd", {}, key), " "])), element("dd", {}, words));
}
