// Requests to the server that the page came from: the key, errors, streams of events.

import { byId, keep, kept } from "./dom.js";

/** An answer that is not 2xx, with the server's own message. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export class Api {
  constructor() {
    this.key = kept("key", "");
    this.asking = null;
  }

  /** Fetches JSON; raises ApiError with the server's message. */
  async json(path, options = {}) {
    const response = await this.fetch(path, options);
    return response.status === 204 ? null : response.json();
  }

  post(path, body, options = {}) {
    return this.json(path, { ...options, method: "POST", body });
  }

  /** Yields the payloads of a stream of server-sent events, until [DONE] or its end. */
  async *events(path, options = {}) {
    const response = await this.fetch(path, options);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    try {
      for (;;) {
        const { value, done } = await reader.read();
        if (done) return;
        const parts = (rest + value).split(/\r?\n\r?\n/);
        rest = parts.pop();
        for (const part of parts) {
          const event = parsed(part);
          if (event === null) continue;
          if (event.data === "[DONE]") return;
          const payload = JSON.parse(event.data);
          if (payload.error) throw new ApiError(payload.error.code ?? 500, payload.error.message);
          yield { name: event.name, payload };
        }
      }
    } finally {
      reader.cancel().catch(() => {});
    }
  }

  async fetch(path, { method = "GET", body, signal } = {}) {
    for (;;) {
      const headers = {};
      if (this.key) headers.Authorization = `Bearer ${this.key}`;
      if (body !== undefined) headers["Content-Type"] = "application/json";
      const sent = this.key;
      const response = await fetch(new URL(path, document.baseURI), {
        method,
        headers,
        signal,
        body: body === undefined ? undefined : JSON.stringify(body),
        credentials: "omit",
      });
      if (response.ok) return response;
      const message = await messageOf(response);
      if (response.status !== 401) throw new ApiError(response.status, message);
      if (this.key === sent && !(await this.askForKey(Boolean(sent)))) {
        throw new ApiError(401, message);
      }
    }
  }

  /** Asks for a key, one dialog for all requests that wait; false where none was given. */
  askForKey(wasWrong = false) {
    this.asking ??= this.dialog(wasWrong).finally(() => {
      this.asking = null;
    });
    return this.asking;
  }

  dialog(wasWrong) {
    const dialog = byId("key-dialog");
    const input = byId("key-input");
    byId("key-note").textContent = wasWrong
      ? "Invalid API key. The key is kept until you close this tab."
      : "The key is kept until you close this tab.";
    input.value = "";
    dialog.returnValue = "";
    byId("key-cancel").onclick = () => dialog.close("");
    byId("key-form").onsubmit = () => this.useKey(input.value.trim());
    dialog.showModal();
    return new Promise((resolve) => {
      dialog.addEventListener("close", () => resolve(Boolean(input.value)), { once: true });
    });
  }

  useKey(key) {
    this.key = key;
    keep("key", key || null);
    byId("key-button").hidden = !key;
  }
}

function parsed(block) {
  const data = [];
  let name = "message";
  for (const line of block.split(/\r?\n/)) {
    if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
    else if (line.startsWith("event:")) name = line.slice(6).trim();
  }
  return data.length ? { name, data: data.join("\n") } : null;
}

async function messageOf(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return text.slice(0, 300) || `the server returned ${response.status}`;
  }
}
