// How many tokens of an answer have come, how fast, and why no more do.

export class Pace {
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
    else if (this.reason === "tool_calls") parts.push("calls tools");
    else if (this.reason && this.reason !== "stop") parts.push(this.reason);
    return parts.join(" · ");
  }
}
