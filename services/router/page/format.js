// Figures as people read them.

export const count = (value) => Number(value || 0);

export function number(value, digits = 3) {
  if (!Number.isFinite(value)) return "–";
  if (value !== 0 && Math.abs(value) >= 10 ** digits) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(digits)));
}

export function ms(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  return value >= 10000 ? `${number(value / 1000)} s` : `${number(value)} ms`;
}

export const percent = (share) => (Number.isFinite(share) ? `${Math.round(share * 100)} %` : "–");

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${number(value)} ${units[unit]}`;
}

export const CAUSES = {
  prefill_compute: ["Prefill compute", "computing prompts, and waiting for a turn behind others", "s0"],
  decode_step: ["Decode step", "the length of decode steps, and waiting for a batch slot", "s2"],
  kv_room: ["KV room", "no free KV blocks", "s1"],
  transfer: ["Transfer", "KV blocks on their way that nothing hides", "s3"],
  queueing: ["Queueing", "in the router's queue although workers had room", "s4"],
  router: ["Router", "between client and workers: text, index, placement, messages", "s6"],
  client: ["Client", "answers are taken more slowly than they come", "s5"],
  failure: ["Failure", "a part of the cluster failed", "s7"],
};

export const PARTS = {
  queue_ms: ["queue", "s4"],
  placement_ms: ["placement", "s6"],
  reserve_ms: ["reserve", "s7"],
  prefix_fetch_ms: ["prefix fetch", "s3"],
  adapter_ms: ["adapter", "s2"],
  prefill_queue_ms: ["prefill queue", "s1"],
  prefill_compute_ms: ["prefill", "s0"],
  return_ms: ["return", "s5"],
};
