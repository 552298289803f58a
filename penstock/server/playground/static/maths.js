// Maths in Markdown: $x$, $$x$$, \(x\) and \[x\] become elements that KaTeX fills.

import { katex } from "./vendor.js";

const LIMITS = { maxExpand: 200, maxSize: 50 }; // a formula cannot hang the page or cover it

/** A plugin of markdown-it. Its elements hold the source until `renderMaths` replaces it. */
export function maths(markdown) {
  markdown.inline.ruler.before("escape", "maths", inline);
  markdown.block.ruler.before("fence", "maths", block, { alt: ["paragraph", "blockquote", "list"] });
  markdown.renderer.rules.maths = (tokens, index) => {
    const { content, block: isBlock, meta } = tokens[index];
    const source = markdown.utils.escapeHtml(content);
    return isBlock ? `<div class="maths display">${source}</div>\n`
      : `<span class="maths${meta.isDisplay ? " display" : ""}">${source}</span>`;
  };
}

const INLINE = [
  ["$$", "$$", true],
  ["\\[", "\\]", true],
  ["\\(", "\\)", false],
  ["$", "$", false],
];

function inline(state, silent) {
  const { src, pos } = state;
  for (const [open, close, isDisplay] of INLINE) {
    if (!src.startsWith(open, pos)) continue;
    const start = pos + open.length;
    const end = findEnd(src, start, close);
    if (end < 0 || end >= state.posMax) continue;
    const source = src.slice(start, end);
    if (!source.trim() || (open === "$" && isPrice(source, src[end + 1]))) continue;
    if (!silent) {
      const token = state.push("maths", "", 0);
      token.content = source.trim();
      token.meta = { isDisplay };
    }
    state.pos = end + close.length;
    return true;
  }
  return false;
}

/** Whether `$source$next` is two prices rather than a formula. */
function isPrice(source, next) {
  return /^\s|\s$/.test(source) || /\d/.test(next ?? "");
}

function findEnd(text, start, close) {
  let end = text.indexOf(close, start);
  while (end > 0 && close[0] === "$" && text[end - 1] === "\\") end = text.indexOf(close, end + 1);
  return end;
}

/** A formula on lines of its own, which may contain blank lines. */
function block(state, firstLine, lastLine, silent) {
  const at = (line) => state.src.slice(state.bMarks[line] + state.tShift[line], state.eMarks[line]).trim();
  const first = at(firstLine);
  const [open, close] = INLINE.find(([mark, , isDisplay]) => isDisplay && first.startsWith(mark)) ?? [];
  if (!open) return false;
  const lines = [];
  let text = first.slice(open.length);
  let line = firstLine;
  while (!text.endsWith(close)) {
    if (text.includes(close)) return false; // text follows: the inline rule's
    lines.push(text);
    line += 1;
    if (line >= lastLine) return false;
    text = at(line);
  }
  lines.push(text.slice(0, -close.length));
  if (silent) return true;
  const token = state.push("maths", "", 0);
  token.block = true;
  token.content = lines.join("\n").trim();
  token.map = [firstLine, line + 1];
  state.line = line + 1;
  return true;
}

/** Draw the formulas in `parent`. One that KaTeX cannot read stays as it was written. */
export function renderMaths(parent) {
  const found = parent.matches(".maths") ? [parent] : parent.querySelectorAll(".maths");
  for (const place of found) {
    const displayMode = place.classList.contains("display");
    const source = place.textContent;
    try {
      katex.render(source, place, { displayMode, strict: "ignore", ...LIMITS });
    } catch {
      place.textContent = source;
      place.classList.add("unread");
    }
  }
}
