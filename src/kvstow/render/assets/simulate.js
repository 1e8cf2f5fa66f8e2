// The page of `kvstow simulate`: curves over time, and a film of who owns which slab.

const data = pageData();
const policies = Object.entries(data.policies);
const LINES = ["--s0", "--s1", "--s2", "--s3"];
const FULLNESS = ["no row held", "up to half of its rows held", "more than half held", "every row held"];
const tile = (value, text) => el("div", { class: "tile" }, el("b", {}, value), el("span", {}, text));

// ── the film ──────────────────────────────────────────────────────────────────────────

const films = policies.filter(([, policy]) => policy.film.slabs[0]?.length);
const canvases = new Map();
const clock = el("output", { for: "scrubber" });
const most = Math.max(1, ...films.map(([, policy]) => policy.film.seconds.length));
const scrubber = el("input", { id: "scrubber", type: "range", min: 0, max: most - 1, value: 0, step: 1 });
const play = el("button", { type: "button", class: "no-print" }, "Play");
let timer = null;

/** Frames are spread over one time: that of the longest film. */
function frameAt(film, seconds) {
  let low = 0;
  let high = film.seconds.length - 1;
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (film.seconds[middle] <= seconds) low = middle;
    else high = middle - 1;
  }
  return low;
}
const longest = films.map(([, policy]) => policy.film).sort((a, b) => b.seconds.at(-1) - a.seconds.at(-1))[0];
const secondsNow = () => longest?.seconds[Math.round((Number(scrubber.value) * (longest.seconds.length - 1)) / Math.max(1, most - 1))] ?? 0;

function decoded(letter) {
  const code = letter.charCodeAt(0) - 33;
  return { owner: Math.floor(code / 4) - 1, level: code % 4 };
}

function groupColour(g) {
  const name = baseName(g);
  return (colourOf[name] ??= Object.keys(colourOf).length % 8);
}
const baseName = (name) => name.split("/")[0];
const colourOf = {};

function drawFilm(name, film, canvas) {
  const frame = film.slabs[frameAt(film, secondsNow())];
  const width = canvas.clientWidth;
  if (!width) return;
  const cell = Math.max(5, Math.min(18, Math.floor(Math.sqrt((width * 170) / frame.length))));
  const across = Math.max(1, Math.floor(width / cell));
  const height = Math.ceil(frame.length / across) * cell;
  const dense = window.devicePixelRatio || 1;
  canvas.width = width * dense;
  canvas.height = height * dense;
  canvas.style.height = `${height}px`;
  const brush = canvas.getContext("2d");
  brush.scale(dense, dense);
  const fills = film.groups.map((group) => resolved(`--g${groupColour(group)}`));
  const nobody = resolved("--line");
  const counts = new Map();
  [...frame].forEach((letter, i) => {
    const { owner, level } = decoded(letter);
    const [x, y] = [(i % across) * cell, Math.floor(i / across) * cell];
    counts.set(owner, (counts.get(owner) ?? 0) + 1);
    brush.globalAlpha = owner < 0 ? 0.35 : [0.22, 0.5, 0.75, 1][level];
    brush.fillStyle = owner < 0 ? nobody : fills[owner];
    brush.fillRect(x, y, cell - 1, cell - 1);
  });
  canvases.get(name).layout = { cell, across, frame };
  canvas.setAttribute("aria-label", `${name}: ${[...counts].sort(([a], [b]) => a - b).map(([owner, number]) => `${owner < 0 ? "nobody" : film.groups[owner]} ${percent(number / frame.length)}`).join(", ")} of the slabs`);
  return counts;
}

function pointed(name, film, canvas, event) {
  const { cell, across, frame } = canvases.get(name).layout ?? {};
  const box = canvas.getBoundingClientRect();
  const at = Math.floor((event.clientY - box.top) / cell) * across + Math.floor((event.clientX - box.left) / cell);
  if (!frame || at < 0 || at >= frame.length) return tip.hide();
  const { owner, level } = decoded(frame[at]);
  return tip.show(canvas, `Slab ${count(at * film.step + 1)}`, [["owner", owner < 0 ? "nobody" : film.groups[owner]], ["rows", FULLNESS[level]]], event);
}

function filmNode([name, policy]) {
  const canvas = el("canvas", { role: "img", style: "width:100%;display:block", tabindex: 0 });
  canvases.set(name, { canvas });
  canvas.addEventListener("pointermove", (event) => pointed(name, policy.film, canvas, event));
  canvas.addEventListener("pointerleave", () => tip.hide());
  const words = el("span", {});
  canvases.get(name).words = words;
  canvases.get(name).draw = redrawn(canvas, () => show());
  const note = policy.film.step > 1 ? `; one in ${policy.film.step} is drawn` : "";
  return el("section", { class: "level" }, el("h3", {}, name, el("small", {}, `${counted(policy.film.num_slabs, "slab")}${note}`)), canvas, el("p", { class: "soft" }, words));
}

function show() {
  const seconds = secondsNow();
  clock.textContent = `${seconds.toLocaleString("en-US")} s`;
  scrubber.setAttribute("aria-valuetext", `${seconds} simulated seconds`);
  for (const [name, policy] of films) {
    const counts = drawFilm(name, policy.film, canvases.get(name).canvas);
    if (counts) canvases.get(name).words.textContent = canvases.get(name).canvas.getAttribute("aria-label").replace(`${name}: `, "");
  }
}

function playing() {
  if (timer) {
    clearInterval(timer);
    timer = null;
    play.textContent = "Play";
    return;
  }
  if (Number(scrubber.value) >= most - 1) scrubber.value = 0;
  play.textContent = "Pause";
  timer = setInterval(() => {
    scrubber.value = Number(scrubber.value) + 1;
    show();
    if (Number(scrubber.value) >= most - 1) playing();
  }, 60);
}
scrubber.addEventListener("input", show);
play.addEventListener("click", playing);

// ── the curves ────────────────────────────────────────────────────────────────────────

/** All policies over one axis of time. */
function joined(readings) {
  const x = [...new Set(readings.flatMap(({ x: times }) => times))].sort((a, b) => a - b);
  const place = new Map(x.map((time, i) => [time, i]));
  return {
    x, series: readings.map(({ x: times, values, ...rest }) => {
      const column = Array(x.length).fill(undefined);
      times.forEach((time, i) => { column[place.get(time)] = values[i]; });
      return { ...rest, values: column };
    }),
  };
}

function curve(title, options, read) {
  const chart = lineChart(title, { xLabel: "simulated seconds", tellX: (n) => n.toLocaleString("en-US"), height: 220, ...options });
  chart.update(joined(policies.map(([name, policy], i) => ({ label: name, colour: LINES[i], ...read(policy) }))));
  return chart.node;
}
const sampled = (key) => (policy) => ({ x: policy.curves.seconds, values: policy.curves[key] });
const shares = (...keys) => (policy) => ({ x: policy.curves.seconds, values: policy.curves.seconds.map((_, i) => keys.reduce((sum, key) => sum + policy.curves[key][i], 0)) });
const asPercent = { formatY: (n) => `${Number((100 * n).toPrecision(3))} %`, tellY: percent, least: 0.01, yLabel: "of bytes in use" };

const ROWS = [
  ["requests at once, mean", (f) => f.mean_requests.toFixed(1)], ["requests at once, peak", (f) => count(f.peak_requests)], ["completed", (f) => count(f.completed)],
  ["preemptions", (f) => count(f.preemptions)], ["bytes in use, mean", (f) => human(f.mean_bytes_in_use)], ["padding", (f) => percent(f.waste.padding)], ["slab fragmentation", (f) => percent(f.waste.fragmentation)],
  ["block rounding", (f) => percent(f.waste.rounding)], ["prompt tokens found cached", (f) => percent(f.hit_rate)], ["rows per run", (f) => f.mean_run_rows.toFixed(1)],
];

for (const [, policy] of films) policy.film.groups.forEach(groupColour);
const [first] = policies;
mount(
  el("header", { class: "top" }, el("div", {}, el("h1", {}, data.model), el("p", { class: "soft" }, `${data.trace} requests on the block ledger, simulated`)), themeButton(() => { recolour(); show(); })),
  el("div", { class: "tiles" }, policies.map(([name, { figures }]) => [tile(figures.mean_requests.toFixed(1), `requests at once, mean (${name})`), tile(percent(figures.waste.total), `of bytes in use wasted (${name})`)]), tile(percent(first[1].figures.hit_rate), "of prompt tokens found cached")),
  films.length ? [
    el("h2", {}, "Who owns which slab"),
    el("p", {}, "One square is one slab: its colour says which group owns it, its strength how many of its rows requests hold."),
    el("ul", { class: "legend" }, Object.entries(colourOf).map(([name, colour]) => el("li", {}, el("span", { class: `swatch g${colour}` }), name)), el("li", {}, el("span", { class: "swatch null" }), "nobody")),
    el("div", { class: "card" },
      el("div", { class: "control" }, el("label", { for: "scrubber" }, "Moment", clock), scrubber), play, films.map(filmNode)),
  ] : [],
  el("h2", {}, "Over time"),
  el("div", { class: "charts" },
    curve("Requests at once", { yLabel: "requests" }, sampled("requests")), curve("Requests waiting", { yLabel: "requests" }, sampled("waiting")),
    curve("Bytes in use", { formatY: human, tellY: bytes, least: 1024 }, sampled("in_use")), curve("Bytes cached for later requests", { formatY: human, tellY: bytes, least: 1024 }, sampled("cached")),
    curve("Padding and fragmentation", asPercent, shares("padding", "fragmentation")), curve("Block rounding", asPercent, shares("rounding")),
    curve("Prompt tokens found cached, so far", { ...asPercent, yLabel: "of prompt tokens" }, (policy) => ({ x: policy.film.seconds, values: policy.film.hit_rate }))),
  el("h2", {}, "In numbers"),
  table(["", ...policies.map(([name]) => name)], ROWS.map(([name, of]) => ({ cells: [name, ...policies.map(([, { figures }]) => of(figures))] })), { caption: "Means are over the time in which requests were waiting" }),
  el("footer", {}, el("p", {}, `kvstow ${data.kvstow}`)),
);
show();
