// Where the time to the first token went, drawn: each part begins where the one before it ended.

import { h, s } from "./dom.js";
import { ms, PARTS } from "./format.js";

/** A bar with a legend of the parts; null where nothing is known. */
export function splitBar(split, whole_ms) {
  const parts = Object.entries(PARTS)
    .map(([name, [title, colour]]) => ({ title, colour, value: split[name] || 0 }))
    .filter((part) => part.value > 0);
  const sum = parts.reduce((all, part) => all + part.value, 0);
  const whole = Math.max(whole_ms || 0, sum);
  if (!whole) return null;
  const svg = s("svg", { class: "split", viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" });
  let at = 0;
  for (const part of parts) {
    svg.append(s("rect", { class: part.colour, x: (100 * at) / whole, y: 0, width: Math.max(0.4, (100 * part.value) / whole), height: 8 }));
    at += part.value;
  }
  const legend = parts
    .filter((part) => part.value >= 0.02 * whole)
    .map((part) => h("li", { class: part.colour }, h("span", { class: "key", "aria-hidden": "true" }), `${part.title} ${ms(part.value)}`));
  return h("div", { class: "ttft" }, svg, h("ul", { class: "legend" }, ...legend));
}
