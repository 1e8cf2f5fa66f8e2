// The page of `kvstow simulate`: curves over time, and the history of the slabs.

const data = pageData();
const policies = Object.entries(data.policies);
const LINES = ["--s0", "--s1", "--s2", "--s3"];

// ── the history ───────────────────────────────────────────────────────────────────────

const histories = policies.filter(([, policy]) => policy.history.slabs[0]?.length);
const clock = el("output", { for: "scrubber" });
const most = Math.max(1, ...histories.map(([, policy]) => policy.history.seconds.length));
const scrubber = el("input", {
  id: "scrubber",
  type: "range",
  min: 0,
  max: most - 1,
  value: Math.floor(most / 3),
  step: 1,
});
const play = el("button", { type: "button", class: "no-print" }, "Play");
let timer = null;

/** Moments are spread over one time: that of the longest history. */
const momentAt = (history, seconds) =>
  Math.max(0, history.seconds.findLastIndex((moment) => moment <= seconds));
const longest = histories
  .map(([, policy]) => policy.history)
  .sort((a, b) => b.seconds.at(-1) - a.seconds.at(-1))[0];
const secondsNow = () =>
  longest?.seconds[
    Math.round((Number(scrubber.value) * (longest.seconds.length - 1)) / Math.max(1, most - 1))
  ] ?? 0;

const maps = histories.map(([name, policy]) => ({
  history: policy.history,
  map: slabMap(name, policy.history),
}));

function show() {
  const seconds = secondsNow();
  clock.textContent = `${seconds.toLocaleString("en-US")} s`;
  scrubber.setAttribute("aria-valuetext", `${seconds} simulated seconds`);
  maps.forEach(({ history, map }) => map.show(history.slabs[momentAt(history, seconds)]));
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
    x,
    series: readings.map(({ x: times, values, ...rest }) => {
      const column = Array(x.length).fill(undefined);
      times.forEach((time, i) => {
        column[place.get(time)] = values[i];
      });
      return { ...rest, values: column };
    }),
  };
}

function curve(title, options, read) {
  const chart = lineChart(title, {
    xLabel: "simulated seconds",
    tellX: (n) => n.toLocaleString("en-US"),
    height: 220,
    ...options,
  });
  chart.update(
    joined(
      policies.map(([name, policy], i) => ({ label: name, colour: LINES[i], ...read(policy) })),
    ),
  );
  return chart.node;
}
const sampled = (key) => (policy) => ({ x: policy.curves.seconds, values: policy.curves[key] });
const shares =
  (...keys) =>
  (policy) => ({
    x: policy.curves.seconds,
    values: policy.curves.seconds.map((_, i) =>
      keys.reduce((sum, key) => sum + policy.curves[key][i], 0),
    ),
  });
const asPercent = {
  formatY: (n) => `${Number((100 * n).toPrecision(3))} %`,
  tellY: percent,
  least: 0.01,
  yLabel: "of bytes in use",
};

const [first] = policies;
mountPage(
  data.model,
  [
    [
      `${counted(data.requests, "request")} of ${data.trace}, simulated on the block ledger`,
      data.arena_bytes ? `${human(data.arena_bytes)} of memory` : null,
      data.seed === null ? null : `seed ${data.seed}`,
    ]
      .filter(Boolean)
      .join(" · "),
    el("code", {}, data.command),
  ],
  [
    el(
      "div",
      { class: "tiles" },
      policies.map(([name, { figures }]) => [
        tile(figures.mean_requests.toFixed(1), `requests at once, mean (${name})`),
        tile(percent(figures.waste.total), `of bytes in use wasted (${name})`),
      ]),
      tile(percent(first[1].figures.hit_rate), "of prompt tokens found cached"),
    ),
    histories.length
      ? [
          el("h2", {}, "Who owns which slab"),
          el(
            "p",
            {},
            "One square is one slab: its colour says which group owns it, its strength how many of its rows requests hold.",
          ),
          slabLegend(),
          el(
            "div",
            { class: "card" },
            el(
              "div",
              { class: "control" },
              el("label", { for: "scrubber" }, "Moment", clock),
              scrubber,
            ),
            play,
            maps.map(({ map }) => map.node),
          ),
        ]
      : [],
    el("h2", {}, "Over time"),
    el(
      "p",
      {},
      `${data.step} Once nobody is waiting, the last requests drain: few rows are left in many slabs, ` +
        "so the wasted parts rise although there is nothing to use the memory for. The numbers below " +
        "leave that time out.",
    ),
    el(
      "div",
      { class: "charts" },
      curve("Requests at once", { yLabel: "requests" }, sampled("requests")),
      curve("Requests waiting", { yLabel: "requests" }, sampled("waiting")),
      curve("Bytes in use", { formatY: human, tellY: bytes, least: 1024 }, sampled("in_use")),
      curve(
        "Bytes cached for later requests",
        { formatY: human, tellY: bytes, least: 1024 },
        sampled("cached"),
      ),
      curve("Padding and fragmentation", asPercent, shares("padding", "fragmentation")),
      curve("Block rounding", asPercent, shares("rounding")),
      curve(
        "Prompt tokens found cached, so far",
        { ...asPercent, yLabel: "of prompt tokens" },
        (policy) => ({ x: policy.history.seconds, values: policy.history.hit_rate }),
      ),
    ),
    el("h2", {}, "In numbers"),
    table(
      ["", ...policies.map(([name]) => name)],
      data.lines.map((cells) => ({ cells })),
      { caption: "Means are over the time in which requests were waiting" },
    ),
  ],
  {
    after: () => {
      recolour();
      show();
    },
    made: [`kvstow ${data.kvstow}`],
  },
);
show();
