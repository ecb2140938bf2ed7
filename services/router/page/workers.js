// The pools: each worker's state and load.

import { byId, h, keyed, s, setText } from "./dom.js";
import { bytes, count, ms, number, percent } from "./format.js";

const ROLES = [
  ["WORKER_ROLE_PREFILL", "Prefill pool", "computes prompts"],
  ["WORKER_ROLE_DECODE", "Decode pool", "writes answers"],
];
const PREFERS = { WORKER_ROLE_PREFILL: "only prefills now", WORKER_ROLE_DECODE: "decodes now" };
const stepsBefore = new Map();

/** Mean time of the steps since the last look, milliseconds; the last known one while it idles. */
function stepMs(name, load) {
  const now = { steps: count(load.num_steps), busy: count(load.busy_s) };
  const before = stepsBefore.get(name);
  if (before && now.steps === before.steps) return before.ms;
  const fresh = !before || now.steps < before.steps;
  const steps = now.steps - (fresh ? 0 : before.steps);
  now.ms = steps ? (1e3 * (now.busy - (fresh ? 0 : before.busy))) / steps : NaN;
  stepsBefore.set(name, now);
  return now.ms;
}

function stateOf(worker) {
  if (!worker.connected) return ["bad", "✕ lost"];
  return worker.load?.draining ? ["warn", "◐ draining"] : ["good", "● up"];
}

/** Right guesses of each method of speculation, of those that were checked since the worker's start. */
function guesses(methods = []) {
  return methods.map((of) => `${of.method} ${percent(count(of.num_accepted) / count(of.num_tokens))} right`).join(", ");
}

function makeWorker(worker) {
  const bar = s("svg", { class: "blocks", viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" });
  for (const kind of ["used", "cached"]) bar.append(s("rect", { class: kind, height: 10, y: 0, x: 0, width: 0 }));
  return h(
    "li",
    { class: "worker card" },
    h("div", { class: "head" }, h("h4", {}, worker.worker.name), h("span", { class: "pill" })),
    h("dl", {}, ...["running", "waiting", "step"].map((name) => h("div", {}, h("dt", {}, name), h("dd", { class: name })))),
    bar,
    h("p", { class: "dim room" }),
    h("p", { class: "dim place" }),
  );
}

function updateWorker(element, worker) {
  const load = worker.load || {};
  const [mood, words] = stateOf(worker);
  const pill = element.querySelector(".pill");
  pill.className = `pill ${mood}`;
  setText(pill, words);
  element.className = `worker card ${mood}`;
  const on = worker.connected;
  setText(element.querySelector(".running"), on ? String(count(load.num_running)) : "–");
  setText(element.querySelector(".waiting"), on ? String(count(load.num_waiting)) : "–");
  setText(element.querySelector(".step"), on ? ms(stepMs(worker.worker.name, load)) : "–");
  const total = count(load.num_total_blocks);
  const free = Math.min(total, count(load.num_free_blocks));
  const cached = Math.min(free, count(load.num_cached_blocks));
  const [used, kept] = element.querySelectorAll("rect");
  used.setAttribute("width", total ? (100 * (total - free)) / total : 0);
  kept.setAttribute("x", total ? (100 * (total - free)) / total : 0);
  kept.setAttribute("width", total ? (100 * cached) / total : 0);
  setText(
    element.querySelector(".room"),
    on ? `KV blocks: ${number(total - free)} in use, ${number(cached)} cached prefix, ${number(free - cached)} empty` : "its requests continue on other workers",
  );
  setText(element.querySelector(".place"), [PREFERS[worker.preference], worker.model, worker.address, on && worker.pool_bytes ? `pool ${bytes(count(worker.pool_bytes))}` : "", guesses(load.guesses), worker.num_adapters ? `adapters ${worker.num_ready_adapters || 0} of ${worker.num_adapters} ready` : "", worker.kernels, worker.dtype, worker.kv_dtype !== worker.dtype && worker.kv_dtype ? `KV ${worker.kv_dtype}` : ""].filter(Boolean).join(" · "));
}

function makePool([role, title, words]) {
  return h("div", { class: "pool" }, h("h3", {}, h("span", { class: "title" }, title), " ", h("span", { class: "dim words" }, words)), h("ul", { class: "list" }));
}

/** Of workers with both roles: how many decode just now, and how far that reaches. */
function splitWords({ num_decoding, num_workers, headroom }) {
  if (headroom === undefined || headroom === null) return "all prefill and decode: nothing is decided yet";
  const words = `headroom ${headroom.toFixed(2)} times the demand`;
  if (num_decoding === num_workers) return `all prefill and decode; ${words}`;
  return `${num_decoding} of ${num_workers} decode, the others only prefill; ${words}`;
}

export function showWorkers(status) {
  const elastic = status.mode === "auto";
  const pools = ROLES.filter(([role]) => status.workers.some((worker) => worker.role === role));
  keyed(byId("workers"), pools, ([role]) => role, makePool, (element, [role, title, words]) => {
    const isElastic = elastic && role === "WORKER_ROLE_DECODE";
    setText(element.querySelector(".title"), isElastic ? "Elastic pool" : title);
    setText(element.querySelector(".words"), isElastic && status.split ? splitWords(status.split) : words);
    const workers = status.workers.filter((worker) => worker.role === role);
    keyed(element.querySelector("ul"), workers, (worker) => `${worker.model} ${worker.worker.name}`, makeWorker, updateWorker);
  });
}
