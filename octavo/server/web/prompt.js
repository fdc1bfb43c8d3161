// The dialog that shows a conversation as the tokens that the model reads.

import { byId, count, h } from "./dom.js";
import { visible } from "./tokens.js";

/** Most tokens that are drawn; of a longer prompt the last ones. */
const MAX_SHOWN = 4000;

/** Renders messages with the model's template and shows the tokens. */
export async function showPrompt(api, model, messages) {
  const note = byId("prompt-note");
  const box = byId("prompt-tokens");
  box.replaceChildren();
  byId("prompt-dialog").showModal();
  if (!messages.length) {
    note.textContent = "The prompt is empty. Write a message first.";
    return;
  }
  note.textContent = "…";
  try {
    const answers = messages.at(-1).role === "assistant";
    const found = await api.post("tokenize", {
      model,
      messages,
      add_generation_prompt: !answers,
      return_token_strs: true,
    });
    note.textContent = noteOf(found);
    box.replaceChildren(...spansOf(found));
  } catch (error) {
    note.textContent = error.status === 404 ? "This server has no /tokenize." : error.message;
  }
}

function noteOf({ count: number, max_model_len: longest, tokens }) {
  const total = number ?? tokens.length;
  const room = longest ? `, of at most ${count(longest)}` : "";
  const cut = tokens.length > MAX_SHOWN ? `; only the last ${count(MAX_SHOWN)} are shown` : "";
  return `${count(total)} tokens${room}${cut}. Tokens added by the template are coloured.`;
}

function spansOf({ tokens, token_strs: texts }) {
  const from = Math.max(0, tokens.length - MAX_SHOWN);
  return tokens.slice(from).flatMap((id, at) => {
    const text = texts?.[from + at] ?? String(id);
    const isSpecial = /^<[^\s<>]+>$|^\[[A-Z_/]+\]$/.test(text);
    const span = h("span", { class: `token${isSpecial ? " special" : ""}`, title: `token ${id}` }, visible(text));
    return text.endsWith("\n") ? [span, h("br")] : [span];
  });
}
