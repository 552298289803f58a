// The conversation that is shown: sending, editing, regenerating, and the answer that is coming.

import { streamEvents } from "./api.js";
import { Conversation } from "./conversation.js";
import { MessageView } from "./message.js";
import { Pace } from "./pace.js";

const $ = (id) => document.getElementById(id);
const FOLLOW_PX = 48;
const DRAWING_SHARE = 0.2; // of the time, at most, goes into drawing an answer that is coming

export class Chat {
  /**
   * `readOptions` returns the request's fields, or null if they are not valid. `onChange` is told
   * of a conversation that has changed, `onError` of an error that may need a key.
   */
  constructor({ readOptions, onChange, onError }) {
    Object.assign(this, { readOptions, onChange, onError });
    this.conversation = new Conversation();
    this.abort = null; // of the answer that is coming
    this.scroller = $("scroller");
    this.follows = true; // the end, as text comes
    this.scroller.addEventListener("scroll", () => {
      const { scrollHeight, scrollTop, clientHeight } = this.scroller;
      this.follows = scrollHeight - scrollTop - clientHeight < FOLLOW_PX;
    });
    this.showAll();
  }

  get isBusy() {
    return this.abort !== null;
  }

  open(conversation) {
    this.stop();
    this.conversation = conversation;
    this.follows = true;
    this.showAll();
  }

  stop() {
    this.abort?.abort();
    this.abort = null;
  }

  /** Say something, and have it answered. False if that is not possible now. */
  send(content, images = []) {
    if (this.isBusy || !(content.trim() || images.length)) return false;
    const options = this.readOptions();
    if (options === null) return false;
    const leaf = this.conversation.path().at(-1);
    this.conversation.add(leaf, { role: "user", content, ...(images.length ? { images } : {}) });
    this.answer(options);
    return true;
  }

  /** Another version of a message, answered anew. */
  edit(node, content) {
    this.branch(node, (parent) => this.conversation.add(parent, { role: "user", content, images: node.images }));
  }

  /** Another answer beside this one. */
  regenerate(node) {
    this.branch(node, (parent) => {
      this.conversation.leaf = parent.id;
      this.conversation.dropIfBlank(node);
    });
  }

  sendResults(node, texts) {
    if (this.isBusy) return;
    const options = this.readOptions();
    if (options === null) return;
    let last = node;
    for (const [index, content] of texts.entries()) {
      const { id, name } = node.toolCalls[index];
      last = this.conversation.add(last, { role: "tool", content, toolCallId: id, name });
    }
    this.answer(options);
  }

  branch(node, begin) {
    this.stop();
    const options = this.readOptions();
    if (options === null) return;
    begin(this.conversation.find(node.parent));
    this.answer(options);
  }

  select(node) {
    this.stop();
    this.conversation.select(node);
    this.showAll();
    this.onChange(this.conversation);
  }

  /** The last node of a role on the path. */
  last(role) {
    return this.conversation.path().findLast((node) => node.role === role);
  }

  async answer({ system, ...fields }) {
    const { conversation } = this;
    const body = {
      ...fields,
      messages: conversation.messages(system),
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
    };
    const abort = (this.abort = new AbortController());
    const question = conversation.path().at(-1);
    const node = conversation.add(question, { role: "assistant", isJson: fields.response_format !== undefined });
    const pace = new Pace();
    this.onChange(conversation);
    this.follows = true;
    this.showAll();
    const view = this.views.at(-1);
    view.begin();
    this.scrollDown();
    const drawing = new Drawing(() => {
      if (this.abort !== abort) return;
      view.show();
      view.say(pace.describe());
      this.scrollDown();
    });
    try {
      for await (const event of streamEvents("v1/chat/completions", body, abort.signal)) {
        const choice = event.choices[0];
        addDelta(node, choice?.delta ?? {});
        pace.count(event, choice);
        drawing.ask();
      }
    } catch (error) {
      if (error.name === "AbortError") {
        pace.reason = "stopped";
      } else {
        node.fault = error.message;
        this.onError(error);
      }
    }
    if (this.abort === abort) this.abort = null;
    node.pace = pace.describe();
    this.onChange(conversation);
    if (this.conversation !== conversation || !view.element.isConnected) return; // another is shown
    view.show();
    view.end();
    if (!this.isBusy) view.askForResults();
    this.showState();
    this.scrollDown();
  }

  showAll() {
    const { conversation } = this;
    const path = conversation.path();
    this.views = path.map((node) => new MessageView(node, conversation.siblings(node), this));
    $("messages").replaceChildren(...this.views.map((view) => view.element));
    for (const view of this.views) view.end();
    if (!this.isBusy) this.views.at(-1)?.askForResults();
    this.showState();
    this.scrollDown();
  }

  scrollDown() {
    if (this.follows) this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  showState() {
    $("send").hidden = this.isBusy;
    $("stop").hidden = !this.isBusy;
    $("welcome").hidden = !this.conversation.isEmpty;
  }
}

/** Draws at most once a frame, and less often when drawing takes long. */
class Drawing {
  constructor(draw) {
    this.draw = draw;
    this.isDue = false;
    this.notBefore = 0;
  }

  ask() {
    if (this.isDue) return;
    this.isDue = true;
    setTimeout(() => requestAnimationFrame(() => this.run()), this.notBefore - performance.now());
  }

  run() {
    this.isDue = false;
    const startedAt = performance.now();
    this.draw();
    const now = performance.now();
    this.notBefore = now + (now - startedAt) / DRAWING_SHARE;
  }
}

function addDelta(node, { content, reasoning, tool_calls: calls }) {
  node.content += content ?? "";
  if (reasoning) node.reasoning = (node.reasoning ?? "") + reasoning;
  for (const { index, id, function: called } of calls ?? []) {
    node.toolCalls ??= [];
    const call = (node.toolCalls[index] ??= { id, name: "", arguments: "" });
    call.name += called?.name ?? "";
    call.arguments += called?.arguments ?? "";
  }
}
