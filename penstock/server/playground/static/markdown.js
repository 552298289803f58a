// Shows Markdown: tables, highlighted code with a copy button, maths. The text is not trusted.

import { copyButton } from "./clipboard.js";
import { element } from "./element.js";
import { maths, renderMaths } from "./maths.js";
import { DOMPurify, hljs, markdownit } from "./vendor.js";

const MAX_HIGHLIGHTED = 100_000; // characters of a block
const ALIGNED = /^text-align:(left|center|right)$/;

// HTML in the text is shown as text. Images are links: the page loads nothing from elsewhere.
const markdown = markdownit({ linkify: true }).disable("image").use(maths);
markdown.linkify.set({ fuzzyLink: false, fuzzyEmail: false });
// The page's content security policy forbids style attributes.
markdown.core.ruler.push("alignment", ({ tokens }) => {
  for (const token of tokens) {
    const side = ALIGNED.exec(token.attrGet("style") ?? "")?.[1];
    if (side) token.attrs = [["class", side]];
  }
});

const ALLOWED = {
  ALLOWED_TAGS: [
    "a", "blockquote", "br", "code", "del", "div", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr",
    "li", "ol", "p", "pre", "s", "span", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
  ],
  ALLOWED_ATTR: ["class", "href", "start", "title"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

/** Shows a text that grows. Blocks that stay the same stay in place, so they can be selected. */
export class MarkdownView {
  constructor(parent) {
    this.parent = parent;
    this.sources = []; // of the blocks that are shown
  }

  show(text) {
    const blocks = [...DOMPurify.sanitize(markdown.render(text), ALLOWED).children];
    const sources = blocks.map((block) => block.outerHTML);
    let same = 0;
    while (same < sources.length && sources[same] === this.sources[same]) same += 1;
    while (this.parent.children.length > same) this.parent.lastElementChild.remove();
    this.parent.append(...blocks.slice(same).map(finish));
    this.sources = sources;
  }
}

/** What Markdown leaves to do in a block. */
function finish(block) {
  const parent = element("div", {}, block);
  for (const link of parent.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer";
  }
  for (const table of parent.querySelectorAll("table")) {
    const region = { class: "table", tabindex: "0", role: "region", "aria-label": "Table" };
    const frame = element("div", region);
    table.replaceWith(frame);
    frame.append(table);
  }
  for (const pre of parent.querySelectorAll("pre")) pre.replaceWith(codeBlock(pre));
  renderMaths(parent);
  return parent.firstElementChild;
}

function codeBlock(pre) {
  const text = pre.textContent.replace(/\n$/, "");
  const language = /(?:^| )language-(\S+)/.exec(pre.firstElementChild?.className ?? "")?.[1] ?? "";
  return showCode(text, language);
}

/** Code in its frame: the language, a copy button, the text in colours. */
export function showCode(text, language) {
  const code = element("code", {});
  if (hljs.getLanguage(language) && text.length < MAX_HIGHLIGHTED) {
    code.innerHTML = hljs.highlight(text, { language, ignoreIllegals: true }).value; // escaped by it
  } else {
    code.textContent = text;
  }
  const label = language ? `Code, ${language}` : "Code";
  return element(
    "div", { class: "code" },
    element("div", { class: "bar" }, element("span", {}, language), copyButton(() => text, { "aria-label": "Copy code" })),
    element("pre", { tabindex: "0", role: "region", "aria-label": label }, code),
  );
}
