// Lines over numbers, by uPlot, in the page's colours.

function resolved(name) {
  const probe = document.body.appendChild(el("span", { style: `color:var(${name});display:none` }));
  const colour = getComputedStyle(probe).color;
  probe.remove();
  return colour;
}

const charts = new Set();
const recolour = () => charts.forEach((chart) => chart.draw());
matchMedia("print").addEventListener("change", recolour);

/** 1500 as 1.5k: for axes, where there is no room. */
function brief(n) {
  if (n === null || n === undefined) return "–";
  for (const [power, unit] of [
    [1e12, "T"],
    [1e9, "G"],
    [1e6, "M"],
    [1e3, "k"],
  ]) {
    if (Math.abs(n) >= power) return `${Number((n / power).toPrecision(3))}${unit}`;
  }
  return String(Number(n.toPrecision(3)));
}

/** Powers of the base in [low, high], at most so many of them. */
function powers(base, low, high, most) {
  const [first, last] = [
    Math.ceil(Math.log(low) / Math.log(base) - 1e-9),
    Math.floor(Math.log(high) / Math.log(base) + 1e-9),
  ];
  const step = Math.max(1, Math.ceil((last - first + 1) / most));
  return Array.from(
    { length: Math.max(0, Math.floor((last - first) / step) + 1) },
    (_, i) => base ** (first + i * step),
  );
}

/** Steps between marks of bytes: powers of two. */
const DOUBLINGS = Array.from({ length: 60 }, (_, i) => 2 ** i);

function axis(side, label, base, format) {
  const [ink, line] = [resolved("--soft"), resolved("--line")];
  const most = (plot) =>
    Math.max(2, Math.floor((side === "y" ? plot.height : plot.width) / (side === "y" ? 45 : 60)));
  return {
    label,
    labelSize: 22,
    labelFont: "12px system-ui, sans-serif",
    font: "12px system-ui, sans-serif",
    stroke: ink,
    size: side === "y" ? 70 : 34,
    space: side === "y" ? 34 : 56,
    grid: { stroke: line, width: 1 },
    ticks: { stroke: line, width: 1 },
    values: (_, splits) => splits.map((n) => (n === null ? "" : format(n))),
    ...(format === human ? { incrs: DOUBLINGS } : {}),
    ...(base
      ? {
          splits: (plot, _, low, high) => powers(base, low, high, most(plot)),
          filter: (_, splits) => splits,
        }
      : {}),
  };
}

const DASHES = [undefined, [7, 7], [2, 5], [12, 4, 2, 4]];

/** Whether an earlier line runs over the same points, so that both would look like one. */
const shadowed = (series, s) =>
  series
    .slice(0, s)
    .some((other) => other.values.every((n, i) => n === series[s].values[i]));

/** A chart of `{x, series: [{label, values, colour, dash, step}]}`; returns `{update(data)}`. */
function lineChart(title, options) {
  const canvas = el("div", {});
  const numbers = el("div", {});
  const node = el(
    "figure",
    { class: "chart card", style: "margin:0" },
    el("h3", {}, title),
    options.note ? el("p", { class: "soft" }, options.note) : null,
    canvas,
    el("details", { class: "no-print" }, el("summary", {}, "the numbers"), numbers),
  );
  const chart = { node, data: null, plot: null, onCursor: options.onCursor };
  const [formatX, formatY] = [options.formatX ?? brief, options.formatY ?? brief];
  chart.make = (width) => {
    chart.plot?.destroy();
    chart.plot = null;
    if (!chart.data) return;
    const { x, series } = chart.data;
    const ready = series.map((each) =>
      each.values.map((n) => (options.logY && !(n > 0) ? null : n)),
    );
    const restAt = Math.max(0, options.restAt ? options.restAt(chart.data) : x.length - 1);
    const rest = (s) => series[s - 1].values[restAt];
    const toldY = (n) => (n === null || n === undefined ? "–" : (options.tellY ?? count)(n));
    chart.plot = new uPlot(
      {
        width,
        height: options.height ?? 260,
        padding: [10, 24, 0, 0],
        scales: {
          x: options.logX ? { time: false, distr: 3, log: options.logX } : { time: false },
          y: options.logY
            ? { distr: 3, log: options.logY }
            : {
                range: (_, low, high) => [
                  Math.min(0, low ?? 0),
                  Math.max((high ?? 0) * 1.05, options.least ?? 1),
                ],
              },
        },
        axes: [
          axis("x", options.xLabel, options.logX, formatX),
          axis("y", options.yLabel, options.logY, formatY),
        ],
        cursor: { drag: { x: false, y: false }, points: { size: 7 } },
        legend: { live: true },
        series: [
          {
            label: options.xLabel,
            value: (_, n) => (options.tellX ?? count)(n ?? x[restAt]),
          },
          ...series.map((each, s) => ({
            label: each.label,
            stroke: resolved(each.colour),
            width: 2,
            dash: each.dash ?? (each.values && shadowed(series, s) ? DASHES[s % DASHES.length] : undefined),
            points: { show: x.length < 40, size: 5 },
            fill: each.fill
              ? `color-mix(in srgb, ${resolved(each.colour)} 18%, transparent)`
              : undefined,
            paths: each.step ? uPlot.paths.stepped({ align: 1 }) : undefined,
            value: (_, n, s) => toldY(n ?? (chart.plot?.cursor.idx == null ? rest(s) : null)),
          })),
        ],
        hooks: { setCursor: [(plot) => chart.onCursor?.(plot.cursor.idx)] },
      },
      [x, ...ready],
      canvas,
    );
    chart.plot.root.querySelector("canvas").setAttribute("role", "img");
    chart.plot.root
      .querySelector("canvas")
      .setAttribute("aria-label", `${title}; the numbers are in a table below`);
  };
  chart.draw = redrawn(canvas, chart.make);
  chart.tabulate = () => {
    const { x, series } = chart.data;
    const step = Math.max(1, Math.ceil(x.length / 40));
    const rows = x
      .map((n, i) => ({
        cells: [
          (options.tellX ?? count)(n),
          ...series.map((each) =>
            each.values[i] === null || each.values[i] === undefined
              ? "–"
              : (options.tellY ?? count)(each.values[i]),
          ),
        ],
      }))
      .filter((_, i) => i % step === 0);
    numbers.replaceChildren(
      table([options.xLabel, ...series.map((each) => each.label)], rows, { caption: title }),
    );
  };
  node.querySelector("details").addEventListener("toggle", () => chart.data && chart.tabulate());
  chart.update = (data) => {
    chart.data = data;
    chart.draw();
    if (node.querySelector("details").open) chart.tabulate();
  };
  charts.add(chart);
  return chart;
}
