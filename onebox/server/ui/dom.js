// Elements from values. Text is always a text node: what a model says is never read as HTML.

export const byId = (id) => document.getElementById(id);

const SVG = "http://www.w3.org/2000/svg";

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value == null) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child != null));
  return node;
}

/** make("p", {class: "quiet"}, "text", node) -> element */
export const make = (tag, attributes = {}, ...children) => filled(document.createElement(tag), attributes, children);

export const svg = (tag, attributes = {}, ...children) => filled(document.createElementNS(SVG, tag), attributes, children);

/** Rows of strings under headings; `numbers` are the columns set to the right. */
export function table(caption, heads, rows, numbers = []) {
  const kind = (i) => (numbers.includes(i) ? { class: "n" } : {});
  return make(
    "table",
    {},
    make("caption", { class: "unseen" }, caption),
    make("thead", {}, make("tr", {}, ...heads.map((h, i) => make("th", { scope: "col", ...kind(i) }, h)))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((cell, i) => make("td", kind(i), cell))))),
  );
}

export const failure = (text) => make("p", { class: "failure", role: "alert" }, text);

const GROUPED = new Intl.NumberFormat("en");
export const grouped = (n) => GROUPED.format(n);
export const percent = (share) => `${Math.round(100 * share)} %`;
export const gigabytes = (bytes) => (bytes >= 9.95e9 ? (bytes / 1e9).toFixed(0) : bytes >= 9.95e7 ? (bytes / 1e9).toFixed(1) : (bytes / 1e9).toFixed(2)) + " GB";
export const speed = (n) => (n >= 100 ? grouped(Math.round(n)) : n.toFixed(1));
