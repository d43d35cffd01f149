// Elements and numbers. Text enters the document as text nodes only, never as HTML.

export const byId = (id) => document.getElementById(id);

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") made.className = value;
    else if (value !== null) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

const SVG = "http://www.w3.org/2000/svg";
export function drawn(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// Unchanged text is left alone: a screen reader, a selection and the scroll position stay where they are.
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// One child per entry, kept from one update to the next; `update(child, entry)` fills it in.
export function fill(parent, entries, make, update) {
  while (parent.children.length > entries.length) parent.lastElementChild.remove();
  while (parent.children.length < entries.length) parent.append(make());
  entries.forEach((entry, place) => update(parent.children[place], entry));
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
export function bytes(count) {
  if (count === null || count === undefined) return "–";
  let size = Math.abs(count), unit = 0;
  while (size >= 1024 && unit < UNITS.length - 1) { size /= 1024; unit += 1; }
  return `${count < 0 ? "−" : ""}${size.toFixed(unit < 2 ? 0 : size < 10 ? 2 : size < 100 ? 1 : 0)} ${UNITS[unit]}`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (value < 120) return `${value.toFixed(value < 10 ? 2 : 0)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  return value < 172800 ? `${(value / 3600).toFixed(1)} h` : `${Math.round(value / 86400)} days`;
}

export function count(value) {
  if (value === null || value === undefined) return "–";
  return value.toLocaleString("en", { maximumFractionDigits: value < 100 ? 1 : 0 });
}

export const percent = (share) => (share === null || share === undefined ? "–" : `${(100 * share).toFixed(share < 0.1 ? 1 : 0)}%`);
