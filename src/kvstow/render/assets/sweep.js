// The page of `kvstow compare`: one line per layout, sorted by whatever column is chosen.

const data = pageData();
const fine = data.lines.filter((line) => line.error === null);
const requestsOf = (layout) => layout.requests[String(data.usual_tokens)];
const copiesOf = (layout) => Math.max(...Object.values(layout.descriptors_per_block));
const most = Math.max(1, ...fine.map(requestsOf));

/** What all layouts have in common is said once, above the table. */
const valuesOf = (name) => [
  ...new Set(data.layouts.map((layout) => layout[name]).filter((value) => value !== null)),
];
const varies = (name) => valuesOf(name).length > 1;
const SWEPT = [
  ["tp", "tp", count],
  ["block_tokens", "tokens per block", count],
  ["kv_dtype", "kv dtype", String],
];
const common = SWEPT.filter(([name]) => !varies(name)).map(
  ([name, words, text]) => `${words} ${valuesOf(name).map(text)}`,
);

/** The answer stands beside what it is an answer for: a narrow screen shows both. */
const ANSWER = 2;
const COLUMNS = [
  ["order", (line) => line.orders.join(" "), String],
  ["packing", (line) => line.packings.join(" "), String],
  [`requests of ${count(data.usual_tokens)}`, requestsOf, count],
  ...SWEPT.filter(([name]) => varies(name)).map(([name, words, text]) => [
    words,
    (layout) => layout[name],
    text,
  ]),
  ["copies per block", copiesOf, count],
  ["padding", (layout) => layout.padding, percent],
  ["slab", (layout) => layout.slab_bytes, human],
];
const shown = el("div", {});
let sorting = { column: ANSWER, down: true };

function sorted() {
  const [, value] = COLUMNS[sorting.column];
  const sign = sorting.down ? -1 : 1;
  return [...fine].sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    return sign * (typeof x === "string" ? x.localeCompare(y) : x - y);
  });
}

function cells(layout) {
  return COLUMNS.map(([, value, words], i) =>
    i === ANSWER
      ? [
          words(value(layout)),
          el("span", { class: "meter", style: `width:${(100 * value(layout)) / most}%` }),
        ]
      : words(value(layout)),
  );
}

function show() {
  shown.replaceChildren(
    table(
      COLUMNS.map(([name]) => name),
      sorted().map((layout) => ({ chosen: layout.best, cells: cells(layout) })),
      { left: 2, caption: "Padding and copies are those of the worst group; the best is marked" },
    ),
  );
}

const chooser = el(
  "select",
  {
    onchange: (event) => {
      sorting = { column: Number(event.target.value), down: Number(event.target.value) > 1 };
      show();
    },
  },
  COLUMNS.map(([name], i) =>
    el("option", { value: i, selected: i === sorting.column }, name),
  ),
);

mountPage(
  `${data.model}: layouts compared`,
  [[data.arena, `pp ${data.pp}`, `rank ${data.rank}`, ...common].join(", ")],
  [
    el(
      "p",
      {},
      `${counted(data.layouts.length, "layout")}; those that differ in nothing but order and packing are one line, `,
      el("label", {}, "sorted by ", chooser),
    ),
    shown,
    data.reasons.map((reason) => el("p", { class: "bad" }, reason)),
  ],
  { made: [el("code", {}, data.command), `kvstow ${data.kvstow}`] },
);
show();
