// One request: where its time went, and why it was placed where it was.

import { json } from "./api.js";
import { byId, h, setText } from "./dom.js";
import { CAUSES, ms, number, percent } from "./format.js";
import { splitBar } from "./split.js";

const ROUTES = {
  hand_off: "prefilled by the prefill pool",
  same_worker: "prefilled where it decodes: no pair of workers was predicted to serve it better",
  collocated: "prefilled where it decodes: the cluster is collocated",
  short_suffix: "prefilled where it decodes: the uncached suffix is short",
  pool_slower: "prefilled where it decodes: the prefill pool was predicted to be slower",
  no_prefill: "prefilled where it decodes: no prefill worker was there",
};

/** Where pairs are compared there is no prefill pool. */
function why({ route, pairs }) {
  return route === "hand_off" && pairs?.length ? "prefilled by another worker" : ROUTES[route] || route;
}

export function startDetail() {
  byId("detail-close").addEventListener("click", () => byId("detail").close());
}

export async function openDetail(id) {
  const body = byId("detail-body");
  setText(byId("detail-title"), id);
  body.replaceChildren(h("p", { class: "dim" }, "asking …"));
  byId("detail").showModal();
  try {
    const found = await json(`status/requests/${encodeURIComponent(id)}`);
    body.replaceChildren(...contents(found));
  } catch (error) {
    body.replaceChildren(h("p", { class: "bad" }, error.message));
  }
}

function contents({ request, ttft_split_ms: split, parts_ms: parts, explanation }) {
  const lost = request.lost_to ? `Lost to ${(CAUSES[request.lost_to]?.[0] || request.lost_to).toLowerCase()} (${request.missed}).` : "";
  const error = request.error ? ` Error: ${request.error}.` : "";
  const found = [
    h("p", {}, `${request.state}: ${request.num_prompt_tokens} tokens in, ${request.num_cached_tokens} of them cached, ${request.num_output_tokens} out. TTFT ${ms(request.ttft_ms)}, TPOT ${ms(request.tpot_ms)}. ${lost}${error}`),
  ];
  const bar = splitBar(split, request.ttft_ms);
  if (bar) found.push(h("h3", {}, "Time to the first token"), bar);
  const spent = Object.entries(parts).sort((a, b) => b[1] - a[1]);
  if (spent.length) {
    found.push(h("h3", {}, "All of its time, by cause"), h("ul", { class: "legend" }, ...spent.map(([name, value]) => h("li", { class: CAUSES[name]?.[2] || "s7" }, h("span", { class: "key", "aria-hidden": "true" }), `${CAUSES[name]?.[0] || name} ${ms(value)}`))));
  }
  for (const attempt of explanation?.attempts || []) found.push(...placement(attempt));
  return found;
}

function placement(attempt) {
  const workers = [attempt.prefill_worker, attempt.decode_worker].filter(Boolean).join(" → ");
  const found = [h("h3", {}, `Placement, attempt ${attempt.attempt}`), h("p", {}, `${workers}, ${why(attempt)}; ${ms(attempt.queue_ms)} in the queue.`)];
  for (const [title, chosen, candidates] of [
    ["decode", attempt.decode_worker, attempt.decode_candidates],
    ["prefill", attempt.prefill_worker, attempt.prefill_candidates],
  ]) {
    if (candidates?.length) found.push(h("div", { class: "scroll" }, candidateTable(title, chosen, candidates)));
  }
  if (attempt.pairs?.length) found.push(h("div", { class: "scroll" }, pairTable(attempt.pairs)));
  return found;
}

/** The pairs that were compared, the one taken first; "here": the prompt is computed where its answer runs. */
function pairTable(pairs) {
  const rows = pairs.map((pair, place) => [
    place ? pair.decode_worker : `${pair.decode_worker} ✓`,
    pair.prefill_worker === pair.decode_worker ? "here" : pair.prefill_worker,
    ms(pair.ttft_ms ?? NaN),
    ms(pair.tpot_ms ?? NaN),
    percent(pair.in_time || 0),
    (pair.score || 0).toFixed(3),
  ]);
  return table(["decode worker", "prefill worker", "TTFT", "TPOT", "in time", "score"], rows, 2);
}

function candidateTable(title, chosen, candidates) {
  const scorers = candidates[0].parts.map((part) => part.scorer);
  const head = [`${title} worker`, "score", ...scorers, "hit tokens", "queued", "free blocks"];
  const rows = candidates.map((one) => [
    one.worker === chosen ? `${one.worker} ✓` : one.worker,
    number(one.score),
    ...one.parts.map((part) => number(part.score)),
    one.num_hit_tokens,
    one.num_queued_tokens,
    one.num_free_blocks,
  ]);
  return table(head, rows, 1);
}

/** The first `texts` columns are words, the others figures. */
function table(head, rows, texts) {
  const kind = (index) => (index < texts ? "" : "n");
  return h(
    "table",
    {},
    h("thead", {}, h("tr", {}, ...head.map((name, index) => h("th", { scope: "col", class: kind(index) }, name)))),
    h("tbody", {}, ...rows.map(([name, ...values]) => h("tr", {}, h("th", { scope: "row" }, name), ...values.map((value, index) => h("td", { class: kind(index + 1) }, String(value)))))),
  );
}
