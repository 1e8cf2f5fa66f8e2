// Elements, numbers in words, and the one tooltip.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || (value === false && !name.startsWith("aria-")))
      continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true && !name.startsWith("aria-") ? "" : String(value));
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

const el = (name, attributes, ...children) =>
  fill(document.createElement(name), attributes, children);
const svg = (name, attributes, ...children) =>
  fill(document.createElementNS(SVG, name), attributes, children);

const mount = (...children) => fill(document.getElementById("page"), {}, children);
const pageData = () => JSON.parse(document.getElementById("data").textContent);

const count = (n) => Math.round(n).toLocaleString("en-US");
const counted = (n, noun) => `${count(n)} ${noun}${n === 1 ? "" : "s"}`;
const percent = (part) => `${(100 * part).toFixed(part && part < 0.0995 ? 2 : 1)} %`;

/** `20 GiB`: four digits at most, so not exact. */
function human(nbytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let power = 0;
  while (Number(nbytes.toPrecision(4)) >= 1024 && power < units.length - 1) {
    nbytes /= 1024;
    power += 1;
  }
  return `${Number(nbytes.toPrecision(4))} ${units[power]}`;
}

/** Both: what is exact, and what can be read. */
const bytes = (n) => (n < 1024 ? counted(n, "byte") : `${count(n)} bytes (${human(n)})`);

const facts = (pairs) =>
  el(
    "dl",
    { class: "facts" },
    pairs.flatMap(([what, value]) => [el("dt", {}, what), el("dd", {}, value)]),
  );

/** A figure and what it is of; red where it is a reason to worry. */
const tile = (value, text, worry) =>
  el(
    "div",
    { class: "tile" },
    el("b", { class: worry ? "bad" : null }, value),
    el("span", {}, text),
  );

/** A group's name without what tells its parts apart: groups of one name have one colour. */
const baseName = (name) => name.split("/")[0];

const tip = {
  node: null,
  show(target, title, pairs, pointer) {
    this.node ??= document.body.appendChild(
      el("div", { id: "tip", role: "presentation", hidden: true }),
    );
    this.node.replaceChildren(el("strong", {}, title), facts(pairs));
    this.node.hidden = false;
    const box = this.node.getBoundingClientRect();
    const there = target.getBoundingClientRect();
    const x = pointer ? pointer.clientX : there.left + there.width / 2;
    const below = pointer ? pointer.clientY + 18 : there.bottom + 8;
    const above = (pointer ? pointer.clientY - 12 : there.top - 8) - box.height;
    const left = Math.min(Math.max(8, x - box.width / 2), window.innerWidth - box.width - 8);
    const top = below + box.height < window.innerHeight || above < 0 ? below : above;
    this.node.style.left = `${Math.max(4, left)}px`;
    this.node.style.top = `${Math.max(4, top)}px`;
  },
  hide() {
    if (this.node) this.node.hidden = true;
  },
};

/** What can be pointed at or focused says what it is. */
function tells(node, { title, facts }) {
  node.addEventListener("pointermove", (event) => tip.show(node, title, facts, event));
  node.addEventListener("focus", () => tip.show(node, title, facts, null));
  for (const over of ["pointerleave", "blur"]) node.addEventListener(over, () => tip.hide());
  return node;
}

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") tip.hide();
});
document.addEventListener("scroll", () => tip.hide(), { passive: true });

/** A drawing that is made again whenever its width changes. */
function redrawn(node, draw) {
  let width = 0;
  const observer = new ResizeObserver(() => {
    const now = Math.floor(node.clientWidth);
    if (now && now !== width) {
      width = now;
      draw(now);
    }
  });
  observer.observe(node);
  return () => {
    if (width) draw(width);
  };
}

/** Says of a table that it is wider than the screen. */
const wide = new ResizeObserver((entries) =>
  entries.forEach(({ target }) =>
    target.classList.toggle("wide", target.scrollWidth > target.clientWidth + 1),
  ),
);

const table = (columns, rows, options = {}) => {
  const node = el(
    "div",
    {
      class: "scroll",
      tabindex: "0",
      role: "region",
      "aria-label": options.caption ?? columns.join(", "),
    },
    options.caption ? el("div", { class: "caption" }, options.caption) : null,
    el(
      "table",
      {},
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          columns.map((name, i) =>
            el("th", { scope: "col", class: i < (options.left ?? 1) ? "left" : null }, name),
          ),
        ),
      ),
      el(
        "tbody",
        {},
        rows.map((row) =>
          el(
            "tr",
            { class: row.chosen ? "chosen" : null },
            row.cells.map((cell, i) =>
              el(
                i ? "td" : "th",
                { scope: i ? null : "row", class: i < (options.left ?? 1) ? "left" : null },
                cell,
              ),
            ),
          ),
        ),
      ),
    ),
  );
  wide.observe(node);
  return node;
};

/** The page's own switch between light and dark; starts with what the system says. */
function themeButton(after) {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const root = document.documentElement.style;
  const isDark = () => (root.colorScheme || (dark.matches ? "dark" : "light")) === "dark";
  const button = el("button", { class: "no-print", type: "button" });
  const tell = () => {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `Switch to ${isDark() ? "light" : "dark"} colours`);
  };
  button.addEventListener("click", () => {
    root.colorScheme = isDark() ? "light" : "dark";
    tell();
    after();
  });
  dark.addEventListener("change", () => {
    tell();
    after();
  });
  tell();
  return button;
}

/** A page: its heading with what stands below it, its parts, and what made it. */
const mountPage = (title, below, parts, { made, after = () => {} }) =>
  mount(
    el(
      "header",
      { class: "top" },
      el("div", {}, el("h1", {}, title), ...below.map((each) => el("p", { class: "soft" }, each))),
      themeButton(after),
    ),
    ...parts,
    el("footer", {}, ...made.map((each) => el("p", {}, each))),
  );
