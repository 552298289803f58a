// A conversation as a tree: an edited message or another answer is a branch of its own.

/**
 * A node: {id, parent, role, content}, and where there are such: images (data URLs), reasoning,
 * toolCalls [{id, name, arguments}], toolCallId, pace, fault, isJson.
 */
export class Conversation {
  constructor({ id = newId(), title = "", updatedAt = Date.now(), nodes = [], leaf = null } = {}) {
    Object.assign(this, { id, title, updatedAt, nodes, leaf });
  }

  get isEmpty() {
    return this.nodes.length === 0;
  }

  find(id) {
    return this.nodes.find((node) => node.id === id);
  }

  /** The nodes that are shown, from the first message to the leaf. */
  path() {
    const path = [];
    for (let node = this.find(this.leaf); node; node = this.find(node.parent)) path.unshift(node);
    return path;
  }

  /** Append a node below `parent`, and show it. */
  add(parent, fields) {
    const node = { id: newId(), parent: parent?.id ?? null, content: "", ...fields };
    this.nodes.push(node);
    this.leaf = node.id;
    this.updatedAt = Date.now();
    if (!this.title && node.role === "user") this.title = titleOf(node);
    return node;
  }

  /** Forget an answer that has no content, so that the next one takes its place. */
  dropIfBlank(node) {
    if (isBlank(node)) this.nodes = this.nodes.filter((other) => other !== node);
  }

  siblings(node) {
    return this.nodes.filter((other) => other.parent === node.parent);
  }

  /** Show the branch of `node`: the newest of what follows it. */
  select(node) {
    let leaf = node;
    for (let next = leaf; next; next = this.nodes.findLast((other) => other.parent === leaf.id)) leaf = next;
    this.leaf = leaf.id;
  }

  /** The messages that the API takes. What was never answered is not said again. */
  messages(system) {
    const path = this.path();
    const messages = system ? [{ role: "system", content: system }] : [];
    for (const [index, node] of path.entries()) {
      const next = path[index + 1];
      if (node.role === "user" && next && isBlank(next)) continue;
      if (node.role !== "assistant" || !isBlank(node)) messages.push(messageOf(node));
    }
    return messages;
  }
}

/** Conversations from an exported file; an Error says what is wrong with it. */
export function readExport(text) {
  let read;
  try {
    read = JSON.parse(text);
  } catch {
    throw new Error("The file is not JSON.");
  }
  const isText = (value) => typeof value === "string";
  const isNode = (node) => isText(node?.id) && isText(node.content)
    && ["user", "assistant", "tool"].includes(node.role)
    && (node.images ?? []).every((url) => isText(url) && url.startsWith("data:image/"))
    && (node.toolCalls ?? []).every((call) => isText(call?.name) && isText(call.arguments));
  const isConversation = (item) => isText(item?.id) && isText(item.title) && Number.isFinite(item.updatedAt)
    && Array.isArray(item.nodes) && item.nodes.every(isNode) && isTree(item.nodes);
  if (!Array.isArray(read?.conversations) || !read.conversations.every(isConversation)) {
    throw new Error("The file is not an export of conversations.");
  }
  return read.conversations.map((item) => new Conversation(item));
}

/** Whether each node comes after its parent, as nodes are made. */
function isTree(nodes) {
  const known = new Set([null]);
  return nodes.every((node) => known.has(node.parent) && known.add(node.id));
}

export function writeExport(conversations) {
  return JSON.stringify({ conversations }, null, 2);
}

function messageOf({ role, content, images, reasoning, toolCalls, toolCallId }) {
  if (role === "tool") return { role, content, tool_call_id: toolCallId };
  if (images?.length) {
    const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
    return { role, content: content ? [...parts, { type: "text", text: content }] : parts };
  }
  if (!toolCalls?.length) return { role, content };
  const calls = toolCalls.map(({ id, name, arguments: text }) => ({
    id, type: "function", function: { name, arguments: text },
  }));
  return { role, content, tool_calls: calls, ...(reasoning ? { reasoning } : {}) };
}

const isBlank = (node) => node.role === "assistant" && !node.content && !node.toolCalls?.length;

function titleOf({ content, images }) {
  const line = content.trim().split("\n")[0];
  return line.length > 60 ? `${line.slice(0, 59)}…` : line || (images?.length ? "Image" : "New chat");
}

function newId() {
  // randomUUID is missing on plain http from another machine.
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}
