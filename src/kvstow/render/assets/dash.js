// The page of `kvstow dash`: what running agents say, asked again every second.

const KEY = new URLSearchParams(location.search).get("key");
const WINDOW = 600;
const agents = new Map();
const where = el("div", {});
const heard = el("p", { class: "soft", role: "status" });
const ago = (seconds) =>
  seconds < 60
    ? `${seconds.toFixed(0)} s`
    : seconds < 3600
      ? `${(seconds / 60).toFixed(0)} min`
      : `${(seconds / 3600).toFixed(1)} h`;
const perSecond = (n) => `${human(Math.round(n))}/s`;

const valuesOf = (reading, name) =>
  (reading.metrics ?? []).filter((sample) => sample.name === name);
const byLabel = (reading, name, label) =>
  Object.fromEntries(
    valuesOf(reading, name).map(({ labels, value }) => [labels[label] ?? "", value]),
  );

const rates = (history, key) =>
  history.map((now, i) =>
    i
      ? Math.max(0, now[key] - history[i - 1][key]) / Math.max(1e-3, now.at - history[i - 1].at)
      : 0,
  );

/** One agent's part of the page; `update` changes what changed. */
function agentPart(source) {
  const part = { history: [], map: null };
  const name = el("h2", {});
  const words = el("p", { class: "soft" });
  const problem = el("p", { class: "bad", role: "alert" });
  const tiles = el("div", { class: "tiles" });
  const slabs = el("div", {});
  const tables = el("div", {});
  const events = el("div", {});
  const times = {
    xLabel: "seconds ago",
    tellX: (n) => `${Math.round(-n)} s ago`,
    formatX: (n) => String(Math.round(-n)),
    height: 190,
  };
  const rate = lineChart("Bytes moved per second", {
    ...times,
    formatY: human,
    tellY: perSecond,
    least: 1024,
  });
  const held = lineChart("Leases and quarantined rows", { ...times, yLabel: "" });
  const charts = el("div", { class: "charts", hidden: true }, rate.node, held.node);
  part.node = el("section", {}, name, words, problem, tiles, charts, slabs, tables, events);

  part.update = (reading, now) => {
    name.textContent = reading.agent ?? source;
    problem.textContent = reading.error ?? "";
    if (reading.error) return;
    const moves = reading.totals?.leases != null; // vLLM's own endpoint counts pulls alone
    charts.hidden = !moves;
    words.textContent = [
      reading.model,
      reading.address === reading.agent ? null : reading.address,
      reading.memory,
      reading.arena_bytes ? `arena ${human(reading.arena_bytes)}` : null,
    ]
      .filter(Boolean)
      .join(" · ");
    events.replaceChildren(...[eventTable(reading, now)].filter(Boolean));
    if (reading.store) {
      showStore(tiles, tables, reading);
      return;
    }
    if (!moves) {
      tables.replaceChildren(...[counterTable(reading), tierTable(reading)].filter(Boolean));
      return;
    }
    if (part.history.at(-1)?.at !== reading.at) part.history.push(reading.totals);
    part.history = part.history.slice(-WINDOW);
    const outcomes = byLabel(reading, "kvstow_transfers_total", "outcome");
    const failures = Object.entries(outcomes).filter(([kind]) => kind !== "accepted");
    const sums = reading.totals;
    const [pulled, served] = ["pulled_bytes", "served_bytes"].map((key) => rates(part.history, key));
    tiles.replaceChildren(
      tile(human(sums.pulled_bytes), "pulled in all"),
      tile(human(sums.served_bytes), "pulled from here by others"),
      tile(count(outcomes.accepted ?? 0), "transfers accepted"),
      tile(count(sums.failures), "transfers failed", sums.failures > 0),
      tile(count(sums.leases), "leases running"),
      tile(count(sums.quarantined_rows), "rows quarantined", sums.quarantined_rows > 0),
      ...(reading.transfers === undefined
        ? []
        : [tile(count(reading.transfers), "transfers running")]),
    );
    const x = part.history.map(({ at }) => at - now);
    rate.update({
      x,
      series: [
        { label: "pulled", colour: "--s0", fill: true, values: pulled },
        { label: "pulled from here", colour: "--s1", values: served },
      ],
    });
    held.update({
      x,
      series: [
        {
          label: "leases",
          colour: "--s0",
          step: true,
          values: part.history.map(({ leases }) => leases),
        },
        {
          label: "quarantined rows",
          colour: "--s1",
          step: true,
          values: part.history.map(({ quarantined_rows }) => quarantined_rows),
        },
      ],
    });
    showSlabs(part, slabs, reading);
    tables.replaceChildren(
      ...[
        failures.length ? failureTable(failures) : null,
        tierTable(reading),
        peerTable(reading),
      ].filter(Boolean),
    );
  };
  return part;
}

/** What a store holds; then what the processes that have it open have done. */
function showStore(tiles, tables, reading) {
  const { rows, data_bytes, capacity, groups, processes } = reading.store;
  tiles.replaceChildren(
    tile(count(rows), "rows"),
    tile(human(data_bytes), "on disk"),
    tile(human(capacity), "at most"),
    tile(count(processes), "processes have it open"),
  );
  const kept = table(
    ["group", "rows", "bytes", "tokens per block", "bytes per row", "free slots", "retired slots"],
    groups.map((group) => ({
      cells: [
        group.name,
        count(group.rows),
        human(group.bytes),
        count(group.block_tokens),
        count(group.row_bytes),
        count(group.free_slots),
        el("span", { class: group.retired_slots ? "bad" : null }, count(group.retired_slots)),
      ],
    })),
    { caption: "Rows" },
  );
  tables.replaceChildren(...[kept, tierTable(reading)].filter(Boolean));
}

function showSlabs(part, node, reading) {
  const map = reading.slabs;
  if (!map?.letters) return;
  if (!part.map) {
    part.map = slabMap("Slabs", map);
    node.replaceChildren(el("div", { class: "card" }, slabLegend(), part.map.node));
  }
  part.map.show(map.letters);
}

const failureTable = (failures) =>
  table(
    ["kind of fault", "transfers"],
    failures.map(([kind, value]) => ({
      cells: [el("span", { class: "bad" }, kind), count(value)],
    })),
    { caption: "Failed transfers" },
  );

/** What a router, or vLLM with kvstow's connector, counts on its /metrics. */
function counterTable(reading) {
  const found = (reading.metrics ?? []).filter(
    ({ name, labels, value }) => name.startsWith("kvstow_") && !("tier" in labels) && value,
  );
  const what = ({ name, labels: { engine, model_name, ...rest } }) =>
    [name.replace(/^kvstow_/, "").replace(/_?total$/, "").replaceAll("_", " "), ...Object.values(rest)]
      .filter(Boolean)
      .join(", ");
  const shown = ({ name, value }) =>
    name.includes("bytes") ? human(value) : Number(value.toPrecision(9)).toLocaleString("en-US");
  return found.length
    ? table(
        ["what", "so far"],
        found.map((sample) => ({ cells: [what(sample), shown(sample)] })),
        { caption: "Counted" },
      )
    : el("p", { class: "soft" }, "Nothing of kvstow is counted there yet.");
}

/** Whatever has a label `tier`: one row per tier, one column per metric. */
function tierTable(reading) {
  const found = (reading.metrics ?? []).filter(({ labels }) => "tier" in labels);
  if (!found.length) return null;
  const columnOf = ({ name, labels }) =>
    [
      name
        .replace(/^kvstow_(offload_|tier_)?/, "")
        .replace(/_total$/, "")
        .replaceAll("_", " "),
      ...Object.entries(labels)
        .filter(([key]) => key !== "tier")
        .map(([, value]) => value),
    ].join(", ");
  const columns = [...new Set(found.map(columnOf))];
  const tiers = [...new Set(found.map(({ labels }) => labels.tier))];
  const cell = (tier, column) =>
    found
      .filter((sample) => sample.labels.tier === tier && columnOf(sample) === column)
      .reduce((sum, { value }) => sum + value, 0);
  return table(
    ["tier", ...columns],
    tiers.map((tier) => ({
      cells: [
        tier,
        ...columns.map((column) =>
          /bytes/.test(column) ? human(cell(tier, column)) : count(cell(tier, column)),
        ),
      ],
    })),
    { caption: "Tiers" },
  );
}

function peerTable(reading) {
  const peers = [
    ...(reading.peers ?? []).map((peer) => ({
      cells: [
        peer.name || peer.address,
        peer.error ? el("span", { class: "bad" }, peer.error.split("\n")[0]) : peer.state,
        peer.direction ?? "–",
        human(peer.moved_bytes),
        peer.moved_seconds ? perSecond(peer.moved_bytes / peer.moved_seconds) : "–",
        peer.silent_seconds === null ? "–" : ago(peer.silent_seconds),
      ],
    })),
    ...(reading.guests ?? []).map((guest) => ({
      cells: [
        guest.name,
        guest.reading ? `reads ${counted(guest.reading, "ticket")}` : "pulls from here",
        "–",
        guest.moved_bytes === undefined ? "–" : human(guest.moved_bytes),
        "–",
        ago(guest.silent_seconds),
      ],
    })),
  ];
  return peers.length
    ? table(["peer", "state", "direction", "moved", "rate", "silent for"], peers, {
        left: 2,
        caption: "Peers",
      })
    : null;
}

function eventTable(reading, now) {
  const events = [...(reading.events ?? [])].reverse().slice(0, 12);
  if (!events.length) return null;
  return el(
    "details",
    { open: true },
    el("summary", {}, "Latest events"),
    table(
      ["ago", "part", "what", "facts"],
      events.map(({ at, part, what, ...rest }) => ({
        cells: [
          ago(Math.max(0, now - at)),
          part,
          what,
          Object.entries(rest)
            .map(
              ([key, value]) =>
                `${key} ${typeof value === "number" && !Number.isInteger(value) ? Number(value.toPrecision(3)) : value}`,
            )
            .join(", "),
        ],
      })),
      { left: 4, caption: "Events" },
    ),
  );
}

async function ask(first) {
  const query = new URLSearchParams({
    ...(KEY ? { key: KEY } : {}),
    ...(first ? { history: "1" } : {}),
  });
  try {
    const answer = await fetch(`state.json?${query}`, { cache: "no-store" });
    if (!answer.ok) throw new Error(`the server says ${answer.status}`);
    const state = await answer.json();
    for (const reading of state.sources) {
      if (!agents.has(reading.source)) {
        agents.set(reading.source, agentPart(reading.source));
        where.append(agents.get(reading.source).node);
      }
      const part = agents.get(reading.source);
      if (first) part.history = reading.history;
      part.update(reading, state.now);
    }
    heard.textContent = `as of ${new Date(state.now * 1000).toLocaleTimeString()}`;
    heard.className = "soft";
  } catch (error) {
    heard.textContent = `no answer: ${error.message}`;
    heard.className = "bad";
  }
  setTimeout(() => ask(heard.className === "bad"), 1000);
}

mount(
  el(
    "header",
    { class: "top" },
    el("div", {}, el("h1", {}, "kvstow"), heard),
    themeButton(() => {
      recolour();
      agents.forEach((part) => part.map?.draw());
    }),
  ),
  where,
  el("footer", {}, el("p", {}, "Read only: this page asks, and changes nothing.")),
);
ask(true);
