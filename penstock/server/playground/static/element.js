// Makes DOM elements.

/** An element with attributes and children. Values of undefined, null and false are left out. */
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === true) made.setAttribute(key, "");
    else if (value != null && value !== false) made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

export function button(label, onClick, attributes = {}) {
  const made = element("button", { type: "button", class: "quiet", ...attributes }, label);
  made.addEventListener("click", onClick);
  return made;
}

/** Save `text` as a file. */
export function download(text, name, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  element("a", { href: url, download: name }).click();
  URL.revokeObjectURL(url);
}
