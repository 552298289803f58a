// Copies text, also where the clipboard API is missing: on plain http from another machine.

import { button, element } from "./element.js";

const SHOWN_MS = 1500;

async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const field = element("textarea", { class: "hidden", readonly: true });
  field.value = text;
  const focused = document.activeElement;
  (document.querySelector("dialog[open]") ?? document.body).append(field);
  field.select();
  const isCopied = document.execCommand("copy");
  field.remove();
  focused?.focus();
  if (!isCopied) throw new Error("The browser did not copy.");
}

/** A button that copies what `getText` returns, and says so. */
export function copyButton(getText, attributes = {}) {
  const made = button("Copy", async () => {
    try {
      await copy(getText());
      made.textContent = "Copied";
    } catch {
      made.textContent = "Not allowed";
    }
    setTimeout(() => (made.textContent = "Copy"), SHOWN_MS);
  }, attributes);
  return made;
}
