// The picture of the architecture, alive: how many requests are where, and what flows between.

import { byId, s, setText } from "./dom.js";
import { bytes, count, number, percent } from "./format.js";

// Two drawings of the same: from left to right, and from top to bottom where the screen is narrow.
const WIDE = {
  box: [0, 0, 1000, 262],
  nodes: { client: [70, 105, 110, 96], queue: [292, 105, 170, 120], prefill: [560, 105, 180, 120], decode: [860, 105, 180, 120], index: [292, 222, 170, 44] },
  edges: {
    ask: ["M125 105H207", 166, 93],
    place: ["M377 105H470", 423, 93],
    ship: ["M650 105H770", 710, 93],
    answer: ["M860 165V230Q860 254 836 254H94Q70 254 70 230V153", 600, 246],
    match: ["M292 165V200", 330, 187],
  },
};
const TALL = {
  box: [0, 0, 340, 640],
  nodes: { client: [170, 54, 130, 92], queue: [110, 170, 180, 100], prefill: [170, 335, 220, 110], decode: [170, 510, 220, 110], index: [288, 170, 88, 64] },
  edges: {
    ask: ["M130 100V120", 170, 115],
    place: ["M130 220V280", 200, 255],
    ship: ["M170 390V455", 235, 428],
    match: ["M200 170H244", 222, 160],
    answer: ["M60 510H36Q14 510 14 488V76Q14 54 36 54H105", 66, 250],
  },
};
const NAMES = { client: "clients", queue: "queue", prefill: "prefill", decode: "decode", index: "KV index" };
const PLACE = { queued: "queue", reserved: "queue", reassigning: "queue", reassigning_held: "queue", prefilling: "prefill", overtaken: "prefill", shipping: "ship", resuming: "ship", resuming_held: "ship", decoding: "decode", copying: "decode", closing_up: "decode", repeating: "decode" };
const MOST_DOTS = 24;

const parts = { layout: null, labels: {}, counts: {}, notes: {}, edges: {}, dots: null };
const dots = new Map();
let last = null;

function draw(layout) {
  const svg = byId("flow");
  svg.setAttribute("viewBox", layout.box.join(" "));
  svg.replaceChildren();
  parts.layout = layout;
  dots.clear();
  for (const [name, [path, x, y]] of Object.entries(layout.edges)) {
    const rail = s("path", { d: path, class: "rail" });
    const line = s("path", { d: path, class: `stream ${name}` });
    const label = s("text", { x, y, class: "edge" });
    parts.edges[name] = { line, label };
    svg.append(rail, line, label);
  }
  for (const [name, [x, y, width, height]] of Object.entries(layout.nodes)) {
    const box = s("rect", { x: x - width / 2, y: y - height / 2, width, height, rx: 12, class: `node ${name}` });
    parts.labels[name] = s("text", { x, y: y - height / 2 + 22, class: "name" }, NAMES[name]);
    parts.counts[name] = s("text", { x, y: y - height / 2 + 56, class: "figure" });
    parts.notes[name] = s("text", { x, y: y + height / 2 - 10, class: "note" });
    svg.append(box, parts.labels[name], parts.counts[name], parts.notes[name]);
  }
  parts.dots = s("g", { class: "dots" });
  svg.append(parts.dots);
}

function rates(status) {
  const sum = (field) => status.workers.reduce((all, worker) => all + count(worker.load?.[field]), 0);
  const now = { at: performance.now() / 1000, bytes: sum("kv_bytes_received"), done: count(status.num_finished) + count(status.num_failed) };
  const before = last;
  last = now;
  if (before === null || now.bytes < before.bytes || now.done < before.done) return { bytes: 0, done: 0 };
  const seconds = Math.max(0.2, now.at - before.at);
  return { bytes: (now.bytes - before.bytes) / seconds, done: (now.done - before.done) / seconds };
}

function stream(name, isFlowing, text) {
  const { line, label } = parts.edges[name];
  line.classList.toggle("flowing", isFlowing);
  setText(label, text);
}

function spot(place, index) {
  const { nodes } = parts.layout;
  if (place === "ship") {
    const [x, y, width, height] = nodes.prefill;
    const [column, line] = [index % 5, Math.floor(index / 5)];
    const down = nodes.decode[0] === x;
    return down ? [x - 60 + column * 11, y + height / 2 + 14 + line * 10] : [x + width / 2 + 34 + column * 13, y + 18 + line * 10];
  }
  const [x, y, width, height] = nodes[place];
  const columns = Math.floor((width - 36) / 12);
  return [x - width / 2 + 24 + (index % columns) * 12, y + height / 2 - 40 + Math.floor(index / columns) * 10];
}

/** A dot a request, which moves where the request does. */
function moveDots(rows) {
  const seen = new Set();
  const places = {};
  for (const row of rows) {
    const place = PLACE[row.state];
    if (place === undefined || parts.layout.nodes[place === "ship" ? "prefill" : place] === undefined) continue;
    const index = places[place] || 0;
    if (index >= MOST_DOTS) continue;
    places[place] = index + 1;
    seen.add(row.request_id);
    let dot = dots.get(row.request_id);
    if (dot === undefined) {
      dot = s("circle", { r: 4, class: "dot" });
      dots.set(row.request_id, dot);
      parts.dots.append(dot);
    }
    const [x, y] = spot(place, index);
    dot.style.transform = `translate(${x}px, ${y}px)`;
    dot.setAttribute("class", `dot ${place}`);
  }
  for (const [id, dot] of dots) {
    if (!seen.has(id)) {
      dot.remove();
      dots.delete(id);
    }
  }
}

export function showFlow(status, rows) {
  const wanted = window.matchMedia("(max-width: 719px)").matches ? TALL : WIDE;
  if (parts.layout !== wanted) draw(wanted);
  const flow = status.flow || {};
  const { bytes: moved, done } = rates(status);
  // Workers with both roles are counted by what they are used for first just now.
  const used = (worker) => (worker.preference && worker.preference !== "WORKER_ROLE_UNSPECIFIED" ? worker.preference : worker.role);
  const pool = (role) => status.workers.filter((worker) => used(worker) === role);
  const up = (role) => `${pool(role).filter((worker) => worker.connected).length} of ${pool(role).length} workers`;
  const collocated = status.mode === "collocated";
  const waiting = count(flow.num_queued) + count(flow.num_reserved);
  const total = waiting + count(flow.num_prefilling) + count(flow.num_shipping) + count(flow.num_decoding);
  const hits = status.window ? count(status.window.num_cached_tokens) / count(status.window.num_prompt_tokens) : NaN;
  setText(parts.counts.client, String(total));
  setText(parts.notes.client, "requests open");
  setText(parts.counts.queue, String(waiting));
  setText(parts.notes.queue, `of ${status.queue_limit} places`);
  setText(parts.counts.prefill, collocated ? "–" : String(count(flow.num_prefilling)));
  setText(parts.notes.prefill, collocated ? "done by decode" : status.mode === "auto" && !pool("WORKER_ROLE_PREFILL").length ? "beside decoding" : up("WORKER_ROLE_PREFILL"));
  setText(parts.counts.decode, String(count(flow.num_decoding) + (collocated ? count(flow.num_prefilling) : 0)));
  setText(parts.notes.decode, up("WORKER_ROLE_DECODE"));
  setText(parts.notes.index, status.store_available ? `${percent(hits)} hits` : "no answer");
  const tokens = status.window ? count(status.window.num_output_tokens) / Math.max(1, status.window.window_s) : 0;
  stream("ask", total > 0 || done > 0, done ? `${number(done)}/s` : "");
  stream("place", count(flow.num_prefilling) > 0 || done > 0, "");
  stream("ship", moved > 0 || count(flow.num_shipping) > 0, moved ? `${bytes(moved)}/s` : "KV blocks");
  stream("answer", count(flow.num_decoding) > 0 || done > 0, `${number(tokens)} tokens/s`);
  stream("match", done > 0 && status.store_available, "");
  moveDots(rows);
  setText(
    byId("flow-words"),
    `${waiting} waiting, ${count(flow.num_prefilling)} in prefill, ${count(flow.num_shipping)} shipping, ${count(flow.num_decoding)} decoding.`,
  );
}
