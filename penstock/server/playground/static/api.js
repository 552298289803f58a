// Talks to the server: the key, errors as messages that people can read, and event streams.

const KEY = "penstock-key";

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export function getKey() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function setKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

/** A response with a good status; anything else is an ApiError. */
export async function request(path, options = {}) {
  const headers = { ...options.headers };
  const key = getKey();
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached.", 0);
  }
  if (!response.ok) throw new ApiError(await errorMessage(response), response.status);
  return response;
}

async function errorMessage(response) {
  const text = await response.text().catch(() => "");
  try {
    return JSON.parse(text).error.message;
  } catch {
    return text || `The server answered with status ${response.status}.`;
  }
}

/** The JSON that answers a JSON body. */
export async function post(path, body, signal) {
  return (await send(path, body, signal)).json();
}

function send(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  return request(path, { method: "POST", headers, body: JSON.stringify(body), signal });
}

/** Each event's JSON as it comes. Ends at [DONE]; an error event becomes an ApiError. */
export async function* streamEvents(path, body, signal) {
  const response = await send(path, body, signal);
  for await (const data of eventData(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(event.error.message, event.error.code);
    yield event;
  }
  throw new ApiError("The connection closed before the answer was complete.", 0);
}

/** The data of each server-sent event, however the bytes are cut into chunks. */
export async function* eventData(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let lines = [];
  for (;;) {
    let chunk;
    try {
      chunk = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("The connection to the server broke.", 0);
    }
    if (chunk.done) return;
    const parts = (rest + chunk.value).split("\n");
    rest = parts.pop();
    for (const part of parts) {
      const line = part.replace(/\r$/, "");
      if (line === "") {
        if (lines.length) yield lines.join("\n");
        lines = [];
      } else if (line.startsWith("data:")) {
        lines.push(line.slice(line[5] === " " ? 6 : 5));
      }
    }
  }
}
