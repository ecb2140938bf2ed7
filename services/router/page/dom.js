// Elements and texts. Everything that others named is set as text, never as markup.

export const byId = (id) => document.getElementById(id);

/** An element: `attributes` as they are in HTML; children are elements or texts. */
export function h(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

/** The same of SVG. */
export function s(name, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Changes a text only where it is another: a screen reader hears of changes alone. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Gives `parent` one child for each item, by key: elements stay where their items do, so that focus does too. Of items
    of one key each has its own. */
export function keyed(parent, items, keyOf, make, update) {
  const known = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  const counts = new Map();
  let place = parent.firstElementChild;
  for (const item of items) {
    const name = keyOf(item);
    const count = counts.get(name) || 0;
    counts.set(name, count + 1);
    const key = count ? `${name}\n${count}` : name;
    let element = known.get(key);
    if (element === undefined) {
      element = make(item);
      element.dataset.key = key;
    }
    known.delete(key);
    if (element === place) place = place.nextElementSibling;
    else parent.insertBefore(element, place);
    update(element, item);
  }
  for (const element of known.values()) element.remove();
}
