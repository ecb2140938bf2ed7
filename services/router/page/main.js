// The page: asks the router once a second while it is looked at, and hands what it says to the parts.

import { call, json } from "./api.js";
import { startChat, showModels } from "./chat.js";
import { startDetail } from "./detail.js";
import { byId, h, setText } from "./dom.js";
import { showFlow } from "./flow.js";
import { showGoodput } from "./goodput.js";
import { showRequests } from "./requests.js";
import { showWorkers } from "./workers.js";

const EVERY_MS = 1000;
const PATIENCE_MS = 10000;
let timer = null;
let polling = false;

function showHead(status) {
  const names = (status.models || []).map((model) => model.name);
  setText(byId("model"), names.length ? `${names.length} models` : status.model_name);
  document.title = `${names.length ? names.join(", ") : status.model_name} · Tandem`;
  const worker = status.workers.find((one) => one.connected && one.kernels);
  const built = worker ? [worker.dtype, worker.kernels] : [];
  setText(byId("facts"), [status.router_name, status.mode, ...built, ...names].filter(Boolean).join(" · "));
  const state = byId("state");
  const wrong = !status.ready ? "bad" : status.degraded.length ? "warn" : "good";
  state.className = `pill ${wrong}`;
  setText(state, wrong === "good" ? "● ready" : wrong === "warn" ? "▲ degraded" : "✕ not ready");
  const words = [...(status.ready ? [] : [status.not_ready_reason]), ...status.degraded];
  const shown = [...byId("notices").children].map((child) => child.textContent);
  if (words.join("\n") !== shown.join("\n")) {
    byId("notices").replaceChildren(...words.map((text) => h("p", { class: "notice" }, text)));
  }
}

function showLost(error) {
  const state = byId("state");
  state.className = "pill bad";
  setText(state, "✕ no answer");
  byId("notices").replaceChildren(h("p", { class: "notice" }, `The router does not answer: ${error.message}`));
}

async function poll() {
  if (polling) return;
  polling = true;
  clearTimeout(timer);
  const begun = performance.now();
  try {
    const [status, rows] = await Promise.all([
      json(`status?window_s=${byId("window").value}`, PATIENCE_MS),
      json("status/requests", PATIENCE_MS),
    ]);
    showHead(status);
    showFlow(status, rows.requests);
    showGoodput(status);
    showWorkers(status);
    showRequests(rows.requests);
    showModels(status);
    document.body.dataset.polled = String(Number(document.body.dataset.polled || 0) + 1);
  } catch (error) {
    showLost(error);
  }
  polling = false;
  if (!document.hidden) timer = setTimeout(poll, Math.max(200, EVERY_MS - (performance.now() - begun)));
}

document.addEventListener("visibilitychange", () => {
  clearTimeout(timer);
  if (!document.hidden) poll();
});
byId("window").addEventListener("change", () => {
  if (!polling) poll();
});
startDetail();
startChat();
poll();
call("version")
  .then((response) => response.json())
  .then((found) => setText(byId("version"), `Tandem ${found.version}`))
  .catch(() => {});
