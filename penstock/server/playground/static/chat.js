// The conversation: what was said, the answer that is coming, and how fast it comes.

import { streamEvents } from "./api.js";
import { showText } from "./text.js";

const $ = (id) => document.getElementById(id);

export class Chat {
  /** `readOptions` gives the request's fields, or null if they are not valid. */
  constructor({ readOptions, onError }) {
    this.readOptions = readOptions;
    this.onError = onError;
    this.turns = []; // {role, content}, as the API wants them
    this.abort = null; // of the answer that is coming
    this.scroller = $("scroller");
    this.follows = true; // the end, as text comes
    this.scroller.addEventListener("scroll", () => {
      const { scrollHeight, scrollTop, clientHeight } = this.scroller;
      this.follows = scrollHeight - scrollTop - clientHeight < 48;
    });
    this.showState();
  }

  get isBusy() {
    return this.abort !== null;
  }

  /** Say something, and have it answered. False if that is not possible now. */
  send(text) {
    if (this.isBusy || !text.trim()) return false;
    const options = this.readOptions();
    if (options === null) return false;
    // What was never answered is not said again: it may be the very reason why it was not.
    if (this.turns.at(-1)?.role === "user") this.turns.pop();
    this.turns.push({ role: "user", content: text });
    const view = new MessageView("user");
    view.show(text);
    $("messages").append(view.element);
    this.answer(options);
    return true;
  }

  stop() {
    this.abort?.abort();
  }

  clear() {
    this.stop();
    this.turns = [];
    $("messages").replaceChildren();
    this.showState();
  }

  /** Answer the last thing that was said, in place of an answer that is there already. */
  again() {
    const options = this.readOptions();
    if (this.isBusy || options === null) return;
    if (this.turns.at(-1)?.role === "assistant") this.turns.pop();
    $("messages").lastElementChild?.remove();
    this.answer(options);
  }

  async answer({ system, ...fields }) {
    const messages = system ? [{ role: "system", content: system }, ...this.turns] : [...this.turns];
    const body = {
      ...fields,
      messages,
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
    };
    const abort = new AbortController();
    const turns = this.turns; // a new chat may begin meanwhile
    const view = new MessageView("assistant");
    const pace = new Pace();
    let text = "";
    let fault = null;
    let isDue = false;
    const draw = () => {
      isDue = false;
      if (this.abort !== abort) return;
      view.show(text);
      view.say(pace.describe());
      this.scrollDown();
    };
    document.querySelectorAll("#messages .buttons").forEach((buttons) => buttons.remove());
    $("messages").append(view.element);
    view.begin();
    this.abort = abort;
    this.follows = true;
    this.showState();
    this.scrollDown();
    try {
      for await (const event of streamEvents("v1/chat/completions", body, abort.signal)) {
        const choice = event.choices[0];
        text += choice?.delta.content ?? "";
        pace.count(event, choice);
        if (!isDue) {
          isDue = true;
          requestAnimationFrame(draw);
        }
      }
    } catch (error) {
      if (error.name === "AbortError") pace.reason = "stopped";
      else fault = error;
    }
    if (text) turns.push({ role: "assistant", content: text });
    if (this.abort === abort) this.abort = null;
    view.show(text);
    view.end(pace.describe(), fault?.message, text, () => this.again());
    if (fault) this.onError(fault);
    this.showState();
    this.scrollDown();
  }

  scrollDown() {
    if (this.follows) this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  showState() {
    $("send").hidden = this.isBusy;
    $("stop").hidden = !this.isBusy;
    $("clear").hidden = this.turns.length === 0;
    $("welcome").hidden = this.turns.length > 0;
  }
}

/** How many tokens have come, how fast, and why no more do. */
class Pace {
  constructor() {
    this.startedAt = performance.now();
    this.firstAt = null;
    this.lastAt = null;
    this.numFirst = 0; // tokens that came at once with the first
    this.numTokens = 0;
    this.reason = "";
  }

  count(event, choice) {
    const numTokens = event.usage?.completion_tokens ?? this.numTokens + (choice ? 1 : 0);
    if (numTokens > this.numTokens) {
      this.lastAt = performance.now();
      if (this.firstAt === null) {
        this.firstAt = this.lastAt;
        this.numFirst = numTokens;
      }
      this.numTokens = numTokens;
    }
    if (choice?.finish_reason) this.reason = choice.finish_reason;
  }

  describe() {
    const parts = [];
    if (this.firstAt !== null) {
      parts.push(this.numTokens === 1 ? "1 token" : `${this.numTokens} tokens`);
      const seconds = (this.lastAt - this.firstAt) / 1000;
      if (seconds > 0) parts.push(`${((this.numTokens - this.numFirst) / seconds).toFixed(1)} tokens/s`);
      parts.push(`first after ${((this.firstAt - this.startedAt) / 1000).toFixed(2)} s`);
    }
    if (this.reason === "length") parts.push("cut at the limit");
    else if (this.reason && this.reason !== "stop") parts.push(this.reason);
    return parts.join(" · ");
  }
}

class MessageView {
  constructor(role) {
    this.element = document.createElement("article");
    this.element.className = `message ${role}`;
    const who = document.createElement("span");
    who.className = "hidden";
    who.textContent = role === "user" ? "You:" : "Answer:";
    this.body = document.createElement("div");
    this.body.className = "body";
    this.element.append(who, this.body);
  }

  begin() {
    this.element.classList.add("streaming");
    this.element.setAttribute("aria-busy", "true"); // read aloud when it is whole
    this.foot = document.createElement("div");
    this.foot.className = "foot";
    this.pace = document.createElement("span");
    this.pace.className = "pace";
    this.pace.textContent = "waiting for the first token";
    this.foot.append(this.pace);
    this.element.append(this.foot);
  }

  show(text) {
    showText(this.body, text);
  }

  say(pace) {
    if (pace) this.pace.textContent = pace;
  }

  end(pace, fault, text, again) {
    this.element.classList.remove("streaming");
    this.element.removeAttribute("aria-busy");
    this.pace.textContent = pace;
    if (fault) {
      const box = document.createElement("p");
      box.className = "fault";
      box.setAttribute("role", "alert");
      box.textContent = fault;
      this.foot.before(box);
    }
    const buttons = document.createElement("span");
    buttons.className = "buttons";
    buttons.append(quiet(fault ? "Try again" : "Regenerate", again));
    if (text && navigator.clipboard) {
      buttons.append(quiet("Copy", () => navigator.clipboard.writeText(text)));
    }
    this.foot.prepend(buttons);
  }
}

function quiet(label, onClick) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "quiet";
  button.textContent = label;
  button.addEventListener("click", onClick);
  return button;
}
