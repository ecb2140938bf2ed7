// Calls of the router, with the API key where one is needed.

import { byId, setText } from "./dom.js";

const KEY = "tandem-api-key";
let asking = null;

export const key = () => sessionStorage.getItem(KEY) || "";

export class Refused extends Error {}

/** A response; asks for a key where the router wants one, and tries again. `patience_ms`: of each try. */
export async function call(path, options = {}, patience_ms = 30000) {
  for (;;) {
    const used = key();
    const headers = { ...options.headers, ...(used ? { authorization: `Bearer ${used}` } : {}) };
    const signal = options.signal || AbortSignal.timeout(patience_ms);
    const response = await fetch(path, { ...options, signal, headers, cache: "no-store", credentials: "omit" });
    if (response.status !== 401) return response;
    if (key() !== used) continue; // another call has got one meanwhile
    await askForKey(used ? "The router does not know this key." : "");
    if (key() === used && used) throw new Refused("no API key");
  }
}

/** A JSON document; throws with the router's own words. */
export async function json(path, patience_ms = 30000) {
  const response = await call(path, {}, patience_ms);
  const content = await response.json().catch(() => null);
  if (!response.ok) throw new Refused(content?.error?.message || `${path}: ${response.status}`);
  return content;
}

function askForKey(complaint) {
  if (asking === null) {
    asking = new Promise((resolve) => {
      const dialog = byId("ask");
      setText(byId("ask-error"), complaint);
      byId("key").value = "";
      byId("ask-form").onsubmit = () => sessionStorage.setItem(KEY, byId("key").value.trim());
      dialog.onclose = () => { // by the form, or by a key that closes dialogs: what asked asks again without an answer
        asking = null;
        resolve();
      };
      if (!dialog.open) dialog.showModal();
      byId("key").focus();
    });
  }
  return asking;
}
