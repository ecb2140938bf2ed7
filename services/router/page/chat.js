// The chat box: streams an answer, and shows where its first token's time went.

import { call, key } from "./api.js";
import { byId, h, setText } from "./dom.js";
import { ms } from "./format.js";
import { splitBar } from "./split.js";

const MAX_TOKENS = 256;
const messages = [];
let running = null;

const model = () => byId("chat-model").value;

function curlLine(prompt) {
  const body = { model: model(), messages: [{ role: "user", content: prompt || "Once upon a time" }], max_tokens: 64, stream: true };
  const quoted = JSON.stringify(body).replaceAll("'", "'\\''");
  const auth = key() ? ` -H "authorization: Bearer $TANDEM_API_KEY"` : "";
  return `curl -N ${location.origin}/v1/chat/completions -H 'content-type: application/json'${auth} -d '${quoted}'`;
}

const showCurl = () => setText(byId("curl"), curlLine(byId("prompt").value.trim()));

export function showModels(status) {
  const names = status.models?.length ? status.models.map((one) => one.name) : [status.model_name];
  const select = byId("chat-model");
  const known = [...select.options].map((option) => option.value);
  if (names.join("\n") !== known.join("\n")) select.replaceChildren(...names.map((name) => h("option", { value: name }, name)));
  byId("chat-model-label").hidden = names.length < 2;
  showCurl();
}

export function startChat() {
  byId("chat").addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) running.abort();
    else ask();
  });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      byId("chat").requestSubmit();
    }
  });
  byId("prompt").addEventListener("input", showCurl);
  byId("copy").addEventListener("click", copy);
}

async function copy() {
  const text = byId("curl").textContent;
  try {
    await navigator.clipboard.writeText(text);
    setText(byId("copy"), "Copied");
  } catch {
    getSelection().selectAllChildren(byId("curl"));
    setText(byId("copy"), "Selected");
  }
  setTimeout(() => setText(byId("copy"), "Copy"), 2000);
}

function bubble(who, text) {
  const element = h("p", { class: `said ${who}` }, text);
  byId("chat-log").append(element);
  toEnd();
  return element;
}

const toEnd = () => byId("chat-log").scrollTo({ top: byId("chat-log").scrollHeight });

async function ask() {
  const prompt = byId("prompt").value.trim();
  if (!prompt) return;
  byId("prompt").value = "";
  bubble("user", prompt);
  messages.push({ role: "user", content: prompt });
  const answer = bubble("assistant", "");
  answer.classList.add("waiting");
  running = new AbortController();
  setText(byId("send"), "Stop");
  let text = "";
  try {
    const end = await stream(running.signal, (piece) => {
      text += piece;
      answer.classList.remove("waiting");
      answer.append(piece);
      toEnd();
    });
    messages.push({ role: "assistant", content: text });
    if (end) byId("chat-log").append(end);
  } catch (error) {
    messages.pop();
    bubble("failed", error.name === "AbortError" ? "stopped" : error.message);
  }
  answer.classList.remove("waiting");
  running = null;
  setText(byId("send"), "Send");
  toEnd();
  showCurl();
}

/** Calls `onText` with each piece of the answer; returns what is to be shown behind it. */
async function stream(signal, onText) {
  const begun = performance.now();
  let first = null;
  let tandem = null;
  const response = await call("v1/chat/completions", {
    method: "POST",
    signal,
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ model: model(), messages, max_tokens: MAX_TOKENS, stream: true }),
  });
  if (!response.ok) {
    const content = await response.json().catch(() => null);
    throw new Error(content?.error?.message || `the router answers ${response.status}`);
  }
  for await (const data of events(response.body)) {
    if (data === "[DONE]") break;
    const event = JSON.parse(data);
    if (event.error) throw new Error(event.error.message);
    const piece = event.choices?.[0]?.delta?.content;
    if (event.tandem?.ttft_ms !== undefined || event.tandem?.ttft) tandem = event.tandem;
    if (piece) {
      first ??= performance.now();
      onText(piece);
    }
  }
  return summary(tandem, first === null ? NaN : first - begun);
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6).trim();
  }
}

function summary(tandem, seen_ms) {
  const split = tandem?.ttft || {};
  const workers = [tandem?.prefill_worker, tandem?.decode_worker].filter(Boolean).join(" → ");
  const words = [`first token after ${ms(seen_ms)}`, split.ttft_ms ? `${ms(split.ttft_ms)} of it in the cluster` : "", workers].filter(Boolean);
  return h("div", { class: "end" }, h("p", { class: "dim" }, words.join(" · ")), splitBar(split, split.ttft_ms));
}
