"use strict";
const root = document.documentElement;
document.getElementById("theme").addEventListener("click", () => {
  const dark = root.dataset.theme
    ? root.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
// Times and rates are compared by their value in one unit.
const PREFIX = { n: 1e-9, "µ": 1e-6, m: 1e-3, k: 1e3, M: 1e6, G: 1e9, T: 1e12, P: 1e15 };
const value = (text) => {
  const found = text.match(/^[±+]?(-?[\d.]+(?:e[+-]?\d+)?)\s*([nµmkMGTP]?)/);
  return found ? Number(found[1]) * (PREFIX[found[2]] ?? 1) : NaN;
};
const compare = (a, b) => {
  const [x, y] = [value(a), value(b)];
  if (Number.isNaN(x) || Number.isNaN(y)) {
    return a.localeCompare(b, "en", { numeric: true });
  }
  return x - y;
};
document.addEventListener("click", (event) => {
  const title = event.target.closest("th");
  if (!title) return;
  const column = title.cellIndex;
  const body = title.closest("table").tBodies[0];
  const down = title.dataset.down !== "yes";
  title.dataset.down = down ? "yes" : "no";
  const rows = [...body.rows];
  const text = (row) => row.cells[column].textContent;
  rows.sort((a, b) => (down ? 1 : -1) * compare(text(a), text(b)));
  body.append(...rows);
});
document.addEventListener("input", (event) => {
  if (!event.target.matches("input.search")) return;
  const words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
  const table = event.target.nextElementSibling.querySelector("table");
  for (const row of table.tBodies[0].rows) {
    const text = row.textContent.toLowerCase();
    row.hidden = !words.every((word) => text.includes(word));
  }
});
