// The table of requests: those that wait or run, then those that ended lately.

import { openDetail } from "./detail.js";
import { byId, h, keyed, setText } from "./dom.js";
import { CAUSES, ms } from "./format.js";

const MOST = 24;
const STATES = { queued: "○ queued", reserved: "○ reserving", reassigning: "○ reserving", reassigning_held: "○ reserving", prefilling: "◔ prefill", overtaken: "◔ prefill", shipping: "◑ shipping", resuming: "◑ resuming", resuming_held: "◑ resuming", decoding: "◕ decoding", copying: "◕ moving", closing_up: "◕ moving", repeating: "◕ moving", finished: "● finished", cut: "● cut short", refused: "✕ refused", failed: "✕ failed" };

function make(row) {
  const button = h("button", { type: "button", class: "link" });
  button.addEventListener("click", () => openDetail(row.request_id));
  const cells = ["state", "n in", "n out", "n ttft", "n tpot", "where"].map((name) => h("td", { class: name }));
  return h("tr", {}, h("th", { scope: "row" }, button), ...cells);
}

function update(element, row) {
  const button = element.querySelector("button");
  setText(button, row.request_id.length > 28 ? `${row.request_id.slice(0, 27)}…` : row.request_id);
  button.title = row.request_id;
  const missed = row.lost_to ? `, lost to ${(CAUSES[row.lost_to]?.[0] || row.lost_to).toLowerCase()}` : "";
  setText(element.querySelector(".state"), `${STATES[row.state] || row.state}${missed}`);
  element.className = row.lost_to ? "lost" : ["finished", "cut", "refused", "failed"].includes(row.state) ? "ended" : "live";
  setText(element.querySelector(".in"), row.num_cached_tokens ? `${row.num_prompt_tokens} (${row.num_cached_tokens} cached)` : String(row.num_prompt_tokens));
  setText(element.querySelector(".out"), String(row.num_output_tokens));
  setText(element.querySelector(".ttft"), ms(row.ttft_ms));
  setText(element.querySelector(".tpot"), ms(row.tpot_ms));
  setText(element.querySelector(".where"), [row.prefill_worker, row.decode_worker].filter(Boolean).join(" → "));
}

export function showRequests(rows) {
  const body = byId("requests").tBodies[0];
  // An id may have been used again: the first of a name is the newest.
  const seen = new Set();
  const shown = rows.filter((row) => !seen.has(row.request_id) && seen.add(row.request_id)).slice(0, MOST);
  if (!shown.length) {
    body.replaceChildren(h("tr", { "data-key": "" }, h("td", { colspan: 7, class: "dim" }, "No request yet: ask something above.")));
    return;
  }
  keyed(body, shown, (row) => row.request_id, make, update);
}
