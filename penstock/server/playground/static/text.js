// Shows a message: plain text as it stands, code between fences as code.

const FENCE = /^ {0,3}```+\s*([\w+#.-]*)[^\n]*$/;

/** Cut a text into {code, language, text} pieces. An open fence runs to the end. */
export function splitFences(text) {
  const pieces = [];
  let piece = { code: false, language: "", lines: [] };
  const finish = () => {
    const joined = piece.lines.join("\n");
    if (piece.code || joined.trim()) {
      pieces.push({ code: piece.code, language: piece.language, text: joined });
    }
  };
  for (const line of text.split("\n")) {
    const fence = FENCE.exec(line);
    if (fence && (!piece.code || fence[1] === "")) {
      finish();
      piece = { code: !piece.code, language: piece.code ? "" : fence[1], lines: [] };
    } else {
      piece.lines.push(line);
    }
  }
  finish();
  return pieces;
}

/** Replace what `element` holds by `text`. Nothing in the text is taken for markup. */
export function showText(element, text) {
  element.replaceChildren(...splitFences(text).map((piece) => (piece.code ? block(piece) : prose(piece.text))));
}

function block({ language, text }) {
  const pre = document.createElement("pre");
  pre.dataset.language = language;
  pre.tabIndex = 0;
  const code = document.createElement("code");
  code.textContent = text;
  pre.append(code);
  return pre;
}

function prose(text) {
  const span = document.createElement("span");
  for (const [index, part] of text.replace(/^\n+|\n+$/g, "").split(/`([^`\n]+)`/).entries()) {
    if (index % 2) {
      const code = document.createElement("code");
      code.textContent = part;
      span.append(code);
    } else {
      span.append(part);
    }
  }
  return span;
}
