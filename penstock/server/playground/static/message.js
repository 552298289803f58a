// Shows one message: its images, reasoning, text, tool calls, and what can be done with it.

import { copyButton } from "./clipboard.js";
import { button, element } from "./element.js";
import { MarkdownView, showCode } from "./markdown.js";

const NAMES = { user: "You:", assistant: "Answer:", tool: "Tool result:" };

export class MessageView {
  /**
   * `actions`: edit(node, text), regenerate(node), select(node), sendResults(node, texts).
   * `siblings`: the branches that begin with this node or in its place.
   */
  constructor(node, siblings, actions) {
    Object.assign(this, { node, siblings, actions });
    this.body = element("div", { class: "body" });
    this.calls = element("div", { class: "calls" });
    this.foot = element("div", { class: "foot" });
    this.pace = element("span", { class: "pace" }, node.pace ?? "");
    const who = element("span", { class: "hidden" }, NAMES[node.role]);
    this.element = element("article", { class: `message ${node.role}` }, who, this.body, this.calls, this.foot);
    this.markdown = new MarkdownView(this.body);
    if (node.images?.length) this.body.before(imageList(node.images));
    this.show();
  }

  show() {
    const { role, content } = this.node;
    if (role === "assistant") this.showAnswer();
    else if (role === "tool") this.showToolResult();
    else this.body.textContent = content;
  }

  showToolResult() {
    const details = element("details", { class: "tool-result" }, element("summary", {}, `Result of ${this.node.name}`));
    details.append(codeOf(this.node.content));
    this.body.replaceChildren(details);
  }

  showAnswer() {
    const { content, reasoning, isJson } = this.node;
    if (reasoning) this.showReasoning(reasoning, Boolean(content || this.node.toolCalls?.length));
    this.markdown.show(isJson && content ? `~~~~~~~~json\n${content}\n~~~~~~~~` : content);
    this.showCalls();
  }

  /** Open while it comes, folded once the answer begins, unless the reader decides otherwise. */
  showReasoning(text, isOver) {
    if (!this.reasoning) {
      this.reasoning = element("details", { class: "reasoning" }, element("summary", {}, "Reasoning"), element("div", {}));
      this.reasoning.firstChild.addEventListener("click", () => (this.isReaders = true));
      this.body.before(this.reasoning);
      this.reasoningText = new MarkdownView(this.reasoning.lastChild);
    }
    if (!this.isReaders) this.reasoning.open = !isOver;
    this.reasoningText.show(text);
  }

  showCalls() {
    const calls = this.node.toolCalls ?? [];
    const source = JSON.stringify(calls);
    if (source === this.callsShown) return;
    this.callsShown = source;
    this.calls.replaceChildren(
      ...calls.map((call) =>
        element("section", { class: "call" }, element("h3", {}, "Calls ", element("code", {}, call.name)), codeOf(call.arguments)),
      ),
    );
  }

  /** Fields for what the tools returned: the page cannot run them. */
  askForResults() {
    const calls = this.node.toolCalls ?? [];
    if (!calls.length) return;
    const fields = calls.map(() => element("textarea", { rows: "2", spellcheck: "false" }));
    for (const [index, section] of [...this.calls.children].entries()) {
      section.append(element("label", {}, `Result of ${calls[index].name}`, fields[index]));
    }
    const send = button("Send results", () => this.actions.sendResults(this.node, fields.map((field) => field.value)), { class: "" });
    this.calls.append(send);
  }

  begin() {
    this.element.classList.add("streaming");
    this.element.setAttribute("aria-busy", "true"); // read aloud when it is whole
    this.say("waiting for the first token");
    this.foot.replaceChildren(this.pace);
  }

  say(pace) {
    if (pace) this.pace.textContent = pace;
  }

  /** The message is whole: show what can be done with it. */
  end() {
    const { role, content, fault, pace } = this.node;
    this.element.classList.remove("streaming");
    this.element.removeAttribute("aria-busy");
    this.pace.textContent = pace ?? "";
    this.element.querySelector(".fault")?.remove();
    if (fault) this.foot.before(element("p", { class: "fault", role: "alert" }, fault));
    const buttons = element("span", { class: "buttons" });
    if (role === "user") buttons.append(button("Edit", () => this.edit(), { class: "quiet edit" }));
    if (role === "assistant") {
      const label = fault ? "Try again" : "Regenerate";
      buttons.append(button(label, () => this.actions.regenerate(this.node), { class: "quiet regenerate" }));
      if (content) buttons.append(copyButton(() => content));
    }
    this.foot.replaceChildren(...this.branches(), buttons, ...(role === "assistant" ? [this.pace] : []));
  }

  /** Which of the branches this is, and buttons that show the others. */
  branches() {
    const count = this.siblings.length;
    if (count < 2) return [];
    const place = this.siblings.indexOf(this.node);
    const step = (to, label, sign) =>
      button(sign, () => this.actions.select(this.siblings[to]), { "aria-label": label, disabled: !this.siblings[to] });
    return [
      element(
        "span", { class: "branches", role: "group", "aria-label": `Version ${place + 1} of ${count}` },
        step(place - 1, "Previous version", "‹"), `${place + 1}/${count}`, step(place + 1, "Next version", "›"),
      ),
    ];
  }

  edit() {
    const field = element("textarea", { "aria-label": "Edit message", rows: "3" });
    field.value = this.node.content;
    const cancel = () => {
      form.replaceWith(this.body);
      this.foot.hidden = false;
      this.foot.querySelector(".edit").focus();
    };
    const form = element(
      "form", { class: "edit-form" }, field,
      element("div", { class: "buttons" }, button("Cancel", cancel), element("button", { type: "submit" }, "Send as a new branch")),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (field.value.trim()) this.actions.edit(this.node, field.value);
    });
    form.addEventListener("keydown", (event) => {
      if (event.key === "Escape") cancel();
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    this.body.replaceWith(form);
    this.foot.hidden = true;
    field.focus();
  }
}

function imageList(urls) {
  const images = urls.map((url, index) => element("li", {}, element("img", { src: url, alt: `Image ${index + 1}` })));
  return element("ul", { class: "images", "aria-label": "Attached images" }, ...images);
}

/** JSON with indentation, or the text if it is none: arguments may still be coming. */
function codeOf(text) {
  try {
    return showCode(JSON.stringify(JSON.parse(text), null, 2), "json");
  } catch {
    return showCode(text, "");
  }
}
