// The page of `kvstow plan`: controls, the zoom, what moving and holding cost.

const ORDER_WORDS = {
  BLHNC: "rows; in a page, heads outside tokens",
  BLNHC: "rows; in a page, tokens outside heads",
  BHLNC: "rows; each head of all layers together",
  LBHNC: "layer by layer, heads outside tokens",
  LBNHC: "layer by layer, tokens outside heads",
  LHBNC: "layer by layer, head by head",
};
const PACKING_WORDS = {
  slab: "slabs of tight rows",
  union: "one row per slab",
  separate: "nothing shared",
};

/** 8192 as 8k: tokens come in powers of two. */
const tokens = (n) => (n >= 1 << 20 ? `${n / (1 << 20)}M` : n >= 1024 ? `${n / 1024}k` : String(n));

const atlas = pageData();
const state = {
  ...atlas.start,
  length: 8192,
  look: { slab: 1, group: 0, row: 0, layer: 0, head: 0, cell: 0, field: 0 },
};

/** One colour per group, the same in every variant. */
const colours = {};
for (const planned of atlas.planned)
  for (const layout of Object.values(planned.layouts))
    for (const group of layout.groups ?? [])
      colours[baseName(group.name)] ??= Object.keys(colours).length % 8;

const VARIED = ["tp", "block_tokens", "pp", "kv_dtype", "memory"];
const variantNow = () => atlas.variants.find((each) => VARIED.every((name) => each[name] === state[name]));
const plannedNow = () => atlas.planned[variantNow().planned];
/** Values that some variant has, those of the start first. */
const valuesOf = (name) => [...new Set(atlas.variants.map((each) => each[name]))];
const layoutOf = (order, packing) => plannedNow().layouts[`${order} ${packing}`];
const ordersOf = (packing) => atlas.orders.filter((order) => layoutOf(order, packing));
const unique = (values) => [...new Set(values)].sort((a, b) => a - b);

// ── controls ──────────────────────────────────────────────────────────────────────────

function choose(changes) {
  Object.assign(state, changes);
  if (!variantNow()) {
    // What was chosen stays; of the variants that have it, the one nearest to the rest.
    const wanted = VARIED.filter((name) => name in changes);
    const far = (each) => VARIED.filter((name) => each[name] !== state[name]).length;
    const fitting = atlas.variants
      .filter((each) => wanted.every((name) => each[name] === state[name]))
      .sort((a, b) => far(a) - far(b));
    VARIED.forEach((name) => (state[name] = fitting[0][name]));
  }
  if (!layoutOf(state.order, state.packing))
    state.order =
      ordersOf(state.packing).find((order) => order[0] === state.order[0]) ??
      ordersOf(state.packing)[0];
  show();
}

/** What can be slid: the name in `state`, a label, the values, and a value in words. */
const SLIDERS = [
  ["block_tokens", "Tokens per block", () => unique(valuesOf("block_tokens")), count],
  ["tp", "Tensor-parallel ranks", () => unique(valuesOf("tp")), (n) => `tp ${n}`],
  ["order", "Order of axes", () => ordersOf(state.packing), String],
  ["pp", "Pipeline stages", () => unique(valuesOf("pp")), (n) => `pp ${n}`],
  ["kv_dtype", "Element type", () => valuesOf("kv_dtype"), String],
  [
    "memory",
    "Memory",
    () => unique(valuesOf("memory")),
    (n) => (n === null ? "as asked" : human(n)),
  ],
  ["length", "Tokens per request", () => atlas.lengths, count],
];
const controls = SLIDERS.map(([id, label, values, words]) => {
  const output = el("output", { for: id });
  const input = el("input", {
    id,
    type: "range",
    min: 0,
    step: 1,
    oninput: () => choose({ [id]: values()[Number(input.value)] }),
  });
  const tell = () => {
    input.max = Math.max(values().length - 1, 0);
    input.value = Math.max(0, values().indexOf(state[id]));
    input.disabled = values().length < 2;
    output.textContent = words(state[id]);
    input.setAttribute("aria-valuetext", words(state[id]));
  };
  return {
    tell,
    node: el("div", { class: "control" }, el("label", { for: id }, label, output), input),
  };
});
const packingButtons = atlas.packings.map((packing) =>
  el("button", { type: "button", onclick: () => choose({ packing }) }, packing),
);
const packingControl = el(
  "fieldset",
  { class: "control" },
  el("legend", {}, "Packing", el("output", {})),
  el("div", { class: "choices" }, packingButtons),
);

// ── parts of the page ─────────────────────────────────────────────────────────────────

const levelsNode = el("div", {});
const parts = {
  tiles: el("div", { class: "tiles", "aria-live": "polite" }),
  words: el("p", { class: "soft" }),
  legend: el("ul", { class: "legend" }),
  address: el("p", { class: "address" }),
  problem: el("p", { class: "bad", role: "alert" }),
  groups: el("div", {}),
  compare: el("div", {}),
  rows: el("div", {}),
  command: el("code", {}),
  subtitle: el("span", {}),
};
/** Before a hover, a legend tells of the chosen length. */
const atChosen = () => atlas.lengths.indexOf(state.length);
const capacity = lineChart("Requests at once", {
  restAt: atChosen,
  logX: 2,
  logY: 10,
  formatX: tokens,
  xLabel: "tokens per request",
  yLabel: "requests",
});
const growth = lineChart("Memory of one request", {
  restAt: atChosen,
  logX: 2,
  logY: 2,
  formatX: tokens,
  xLabel: "tokens per request",
  formatY: human,
  tellY: bytes,
});
const growthWords = el("p", {});

const atLength = (list, tokens) => list[atlas.lengths.indexOf(tokens)];

function showTiles(layout) {
  const planned = plannedNow();
  const worst = Math.max(...layout.copies);
  parts.tiles.replaceChildren(
    tile(
      counted(worst, worst === 1 ? "copy" : "copie"),
      `to move a block; one tensor per layer, keys and values apart, needs ${count(planned.per_layer.descriptors_per_block)}`,
    ),
    tile(
      human(Math.max(...layout.groups.map((group) => group.row_bytes)) / (worst === 1 ? 1 : worst)),
      worst === 1
        ? `in that copy at most; per layer ${human(planned.per_layer.bytes_per_descriptor_max)}`
        : "in a copy, on average",
    ),
    tile(percent(Math.max(...layout.padding)), "of a slab is padding, in the worst group"),
    tile(
      count(atLength(layout.requests, state.length)),
      `requests of ${count(state.length)} tokens at once`,
    ),
    tile(
      layout.max_tokens === null ? "any length" : `${brief(layout.max_tokens)} tokens`,
      "the longest request that fits",
    ),
    tile(
      human(layout.arena_bytes),
      `arena: ${counted(layout.num_slabs, "slab")} of ${human(layout.slab_bytes)}`,
    ),
  );
}

function showGroups(drawn) {
  const { layout } = drawn;
  parts.legend.replaceChildren(
    ...layout.groups.map((group, g) =>
      el(
        "li",
        {},
        el("span", { class: `swatch g${drawn.colour(g)}` }),
        `${group.name}: ${group.keeps}`,
      ),
    ),
    el("li", {}, el("span", { class: "swatch padding" }), "padding"),
    ...(drawn.hasSlabs
      ? [el("li", {}, el("span", { class: "swatch null" }), "slab 0, the null slab: nobody's")]
      : []),
  );
  parts.groups.replaceChildren(
    table(
      [
        "group",
        "keeps",
        "layers",
        "tokens per block",
        "row bytes",
        "rows per slab",
        "padding",
        "copies",
      ],
      layout.groups.map((group, g) => ({
        cells: [
          el("span", {}, el("span", { class: `swatch g${drawn.colour(g)}` }), group.name),
          group.keeps,
          count(group.num_layers),
          count(group.block_tokens),
          count(group.row_bytes),
          count(group.rows_per_slab),
          percent(layout.padding[g]),
          count(layout.copies[g]),
        ],
      })),
      { left: 2, caption: "Groups: layers that share a block table" },
    ),
  );
}

function showCurves(layout) {
  const lines = [
    ["slab", "--s0"],
    ["union", "--s1"],
    ["separate", "--s2"],
  ];
  const order = atlas.orders.find(
    (each) => each[0] === state.order[0] && lines.every(([packing]) => layoutOf(each, packing)),
  );
  const series = lines
    .map(([packing, colour]) => ({
      label: packing,
      colour,
      dash: packing === "slab" ? undefined : [6, 4],
      of: layoutOf(order, packing),
    }))
    .filter(({ of }) => !of.error);
  capacity.update({
    x: atlas.lengths,
    series: series.map(({ of, ...rest }) => ({ ...rest, values: of.requests })),
  });
  growth.update({
    x: atlas.lengths,
    series: [
      { label: "in all", colour: "--s0", values: layout.request_bytes },
      {
        label: "fixed part, at most",
        colour: "--s1",
        dash: [6, 4],
        values: atlas.lengths.map(() => layout.fixed_bytes),
      },
      {
        label: "growing part",
        colour: "--s2",
        dash: [2, 3],
        values: atlas.lengths.map((n) => n * layout.bytes_per_token),
      },
    ],
  });
  growthWords.textContent = `A request takes at most ${bytes(layout.fixed_bytes)} that do not grow (windows, states, encoder rows) and ${count(layout.bytes_per_token)} bytes per token that do, padding included. Capacities count whole slabs and one request in the middle of a prefill.`;
}

/** What makes this very layout on the command line. */
function command() {
  const options = {
    tp: state.tp > 1 ? state.tp : null,
    pp: state.pp > 1 ? state.pp : null,
    rank: atlas.rank || null,
    "block-tokens": state.block_tokens,
    "kv-dtype": state.kv_dtype === atlas.kv_dtype ? atlas.asked_dtype : state.kv_dtype,
    order: state.order,
    packing: state.packing,
    memory: state.memory,
    "num-slabs": atlas.slabs_asked,
    name: atlas.name,
  };
  const given = Object.entries(options).filter(([, value]) => value !== null);
  const aligned = atlas.align.map((wish) => ["align", wish]);
  const words = [...given, ...aligned].flatMap(([name, value]) => [`--${name}`, String(value)]);
  return ["kvstow", "plan", atlas.source, ...words].map(quoted).join(" ");
}

/** A word as a shell takes it. */
const quoted = (word) =>
  /^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'"'"'`)}'`;

let drawn = null;
const drawZoom = redrawn(levelsNode, (width) => {
  if (!drawn) return;
  const look = (changes) => {
    state.look = drawn.inside({ ...state.look, ...changes });
    drawZoom();
  };
  drawLevels(levelsNode, drawn.levels(state.look, width, look), width);
  parts.address.textContent = drawn.addressInWords(state.look);
});
const drawCompared = redrawn(parts.rows, drawRows);

function show() {
  const layout = layoutOf(state.order, state.packing);
  controls.forEach((control) => control.tell());
  packingButtons.forEach((button) =>
    button.setAttribute("aria-pressed", button.textContent === state.packing),
  );
  packingControl.querySelector("output").textContent = PACKING_WORDS[state.packing];
  parts.words.textContent = `${state.order}: ${ORDER_WORDS[state.order]}. Letters, outermost axis first: L layer, B block, H head, N token, C content.`;
  parts.command.textContent = command();
  const stages = state.pp > 1 ? ` of ${state.pp} stages` : "";
  parts.subtitle.textContent = `KV cache layout: ${state.kv_dtype}, rank ${atlas.rank}${stages}`;
  parts.problem.textContent = layout.error ?? "";
  showCompared();
  if (layout.error) return;
  const before = drawn?.hasSlabs;
  drawn = new Zoom(layout, atlas, colours);
  if (before !== drawn.hasSlabs)
    state.look.row = drawn.hasSlabs ? 0 : layout.groups[0].rows_per_slab;
  state.look = drawn.inside(state.look);
  showTiles(layout);
  showGroups(drawn);
  showCurves(layout);
  drawZoom();
  drawCompared();
}

hatch();
mountPage(
  atlas.model,
  [parts.subtitle],
  [
    el(
      "form",
      { class: "controls", "aria-label": "Plan again", onsubmit: (event) => event.preventDefault() },
      controls.map((control) => control.node),
      packingControl,
    ),
    el(
      "p",
      { class: "soft" },
      "Stages, element type and memory are varied one at a time. What fits is what fits on this rank.",
    ),
    parts.problem,
    parts.tiles,
    el("h2", {}, "Where the bytes are"),
    el(
      "p",
      {},
      "Everything is drawn to scale. Choose a piece to see what is inside it; arrow keys move along a strip and between strips.",
    ),
    parts.words,
    parts.legend,
    el("div", { class: "card" }, levelsNode),
    el(
      "div",
      { class: "card" },
      el("h3", { style: "margin-top:0" }, "The address of what is chosen"),
      el(
        "p",
        { class: "soft" },
        "offset + block × block stride + head × head stride + token × token stride + field, in bytes from the start of the arena",
      ),
      parts.address,
    ),
    el("h2", {}, "Groups"),
    parts.groups,
    el("h2", {}, "What fits"),
    growthWords,
    el("div", { class: "charts" }, capacity.node, growth.node),
    el("h2", {}, "Against other layouts"),
    el(
      "p",
      {},
      "The same model and the same memory. A copy is one contiguous range of bytes: what a NIC or a DMA engine is handed.",
    ),
    parts.compare,
    el(
      "div",
      { class: "card" },
      el(
        "p",
        { class: "soft" },
        "One block of every group, to one scale. Hatched bytes are allocated, and moved, for nothing.",
      ),
      parts.rows,
    ),
  ],
  {
    after: recolour,
    made: [
      parts.command,
      ...atlas.notes.map((note) => `Assumed: ${note}`),
      `kvstow ${atlas.kvstow}`,
    ],
  },
);
show();
