// The figures against the targets, and what requests are lost to.

import { byId, h, keyed, s, setText } from "./dom.js";
import { CAUSES, count, ms, number, percent } from "./format.js";

const KEPT = 90;
const history = {};

function remember(name, value) {
  const values = (history[name] ||= []);
  values.push(Number.isFinite(value) ? value : 0);
  if (values.length > KEPT) values.shift();
  return values;
}

function line(values) {
  const most = Math.max(...values, 1e-9);
  const points = values.map((value, index) => `${((index + KEPT - values.length) / (KEPT - 1)) * 100},${26 - (value / most) * 24}`);
  return points.join(" ");
}

function tileOf(window) {
  const share = count(window.num_good) / count(window.num_requests);
  const hits = count(window.num_cached_tokens) / count(window.num_prompt_tokens);
  const against = (figure, target) => {
    if (!target) return ["", "no target is set"];
    if (!figure.p50_ms) return ["", `target ${ms(target)}`];
    return [figure.p95_ms <= target ? "good" : "bad", `${figure.p95_ms <= target ? "✓ within" : "✕ beyond"} the target of ${ms(target)} at p95`];
  };
  const [ttftMood, ttftNote] = against(window.ttft, window.ttft_target_ms);
  const [tpotMood, tpotNote] = against(window.tpot, window.tpot_target_ms);
  return [
    { name: "Goodput", value: number(window.goodput), unit: "req/s", note: count(window.num_requests) ? `${percent(share)} of ${count(window.num_requests)} requests were good` : "no request ended lately", at: window.goodput, mood: count(window.num_requests) ? (share >= 0.9 ? "good" : "bad") : "" },
    { name: "TTFT", value: ms(window.ttft.p50_ms || NaN), unit: `p95 ${ms(window.ttft.p95_ms || NaN)}`, note: ttftNote, at: window.ttft.p50_ms, mood: ttftMood },
    { name: "TPOT", value: ms(window.tpot.p50_ms || NaN), unit: `p95 ${ms(window.tpot.p95_ms || NaN)}`, note: tpotNote, at: window.tpot.p50_ms, mood: tpotMood },
    { name: "Prefix hits", value: percent(hits), unit: "", note: `of ${number(count(window.num_prompt_tokens))} prompt tokens`, at: hits, mood: "" },
    { name: "Output", value: number(count(window.num_output_tokens) / Math.max(1, window.window_s)), unit: "tokens/s", note: `${count(window.num_refused)} refused, ${count(window.num_failed)} failed`, at: count(window.num_output_tokens), mood: "" },
  ];
}

function makeTile(tile) {
  return h(
    "div",
    { class: "tile" },
    h("h3", {}, tile.name),
    h("p", { class: "value" }, h("span", { class: "big" }), " ", h("small")),
    s("svg", { class: "spark", viewBox: "0 0 100 28", preserveAspectRatio: "none", "aria-hidden": "true" }, s("polyline")),
    h("p", { class: "dim note" }),
  );
}

function updateTile(element, tile) {
  element.className = `tile ${tile.mood}`;
  setText(element.querySelector(".big"), tile.value);
  setText(element.querySelector("small"), tile.unit);
  setText(element.querySelector(".note"), tile.note);
  element.querySelector("polyline").setAttribute("points", line(remember(tile.name, tile.at)));
}

function verdict(window) {
  const lost = count(window.num_requests) - count(window.num_good);
  if (!count(window.num_requests)) return "Nothing to say yet: no request has ended in this time.";
  if (!lost) return window.ttft_target_ms || window.tpot_target_ms ? "Nothing: every request met its targets." : "Nothing was lost. Without targets, late requests are not told apart.";
  const name = CAUSES[window.binding]?.[0] || window.binding;
  const share = window.causes[0].lost_share;
  return `${name}: it cost ${window.causes[0].num_lost} of ${count(window.num_requests)} requests (${percent(share)}).`;
}

/** Which split of the workers would have served the window better; empty where that is not known. */
function splitVerdict(split) {
  if (!split) return "";
  const model = split.model ? `${split.model}: ` : "";
  const of = (count) => `${count} of ${split.num_workers} workers decoding`;
  if (!split.worth_it) return `${model}${of(split.num_decoding)} was about the best split for these requests: headroom ${split.headroom.toFixed(2)}.`;
  const all = split.best_decoding === split.num_workers;
  const better = all ? `all ${split.num_workers} workers prefilling and decoding` : `${of(split.best_decoding)}${split.elastic ? ", prompts beside answers (mode auto)," : ""}`;
  return `${model}With ${better} headroom would have been ${split.best_headroom.toFixed(2)} instead of ${split.headroom.toFixed(2)} times the demand.`;
}

function makeCause([name]) {
  const [title, words, colour] = CAUSES[name] || [name, "", "s7"];
  return h(
    "li",
    { class: `cause ${colour}` },
    h("span", { class: "title" }, h("span", { class: "key", "aria-hidden": "true" }), title),
    h("span", { class: "lost" }),
    h("span", { class: "bar", "aria-hidden": "true" }, h("span")),
    h("span", { class: "time dim" }),
    h("span", { class: "words dim" }, words),
  );
}

function updateCause(element, [, share]) {
  setText(element.querySelector(".lost"), share.num_lost ? `${share.num_lost} lost` : "");
  element.querySelector(".bar span").style.width = `${100 * share.time_share}%`;
  setText(element.querySelector(".time"), `${percent(share.time_share)} of the time`);
  element.classList.toggle("binding", share.num_lost > 0);
}

export function showGoodput(status) {
  const window = status.window;
  if (!window) return;
  keyed(byId("tiles"), tileOf(window), (tile) => tile.name, makeTile, updateTile);
  setText(byId("binds"), verdict(window));
  setText(byId("better-split"), splitVerdict(window.split));
  let list = byId("causes").firstElementChild;
  if (list === null) byId("causes").append((list = h("ul", { class: "causes" })));
  const shown = window.causes.filter((share) => share.num_lost || share.time_share >= 0.005);
  keyed(list, shown.map((share) => [share.cause, share]), ([name]) => name, makeCause, updateCause);
}
