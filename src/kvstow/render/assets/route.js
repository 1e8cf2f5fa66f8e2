// The page of `kvstow route`: copies as bands from source blocks to destination blocks.

const data = pageData();
let chosen = 0;
const picture = el("div", {});
const words = el("p", {});
const tabs = el("div", { class: "choices" });

const seconds = (s) =>
  s >= 1
    ? `${s.toPrecision(3)} s`
    : s >= 1e-3
      ? `${(s * 1e3).toPrecision(3)} ms`
      : `${(s * 1e6).toPrecision(3)} µs`;
const fine = (n) => (Number.isInteger(n) ? count(n) : n.toLocaleString("en-US"));

/** The blocks of one side as segments: pages where they can be told apart, blocks otherwise. */
function sideSegments(side, at, colour, width, scale, name) {
  const thin = (side.block_bytes * scale) / side.pieces.length < 3;
  const segments = [];
  for (let block = 0; block < side.num_blocks; block += 1) {
    const start = at + block * side.block_bytes;
    if (thin) {
      segments.push({
        at: start,
        nbytes: side.block_bytes,
        group: colour,
        alt: block % 2 === 1,
        names: [`block ${block}`, String(block)],
        title: `${name}block ${block}`,
        facts: [
          ["bytes", bytes(side.block_bytes)],
          ["pieces", count(side.pieces.length)],
        ],
      });
      continue;
    }
    side.pieces.forEach(([place, nbytes, layer], i) =>
      segments.push({
        at: start + place,
        nbytes,
        group: colour,
        alt: (i + block) % 2 === 1,
        names: [shortLayer(layer)],
        title: `${name}${layer}`,
        facts: [
          ["block", String(block)],
          ["bytes", bytes(nbytes)],
        ],
      }),
    );
  }
  return segments;
}

/** A rank, and its group where one rank has several for this destination group. */
const sourceName = (group, source) =>
  new Set(group.sources.map(({ group: name }) => name)).size > 1
    ? `${source.name} ${source.group}`
    : source.name;
const shortLayer = (name) => `L${name.split(".").find((part) => /^\d+$/.test(part)) ?? ""}`;

function bandPath([, s, sBytes, d, dBytes], top, bottom, height) {
  const [a, b] = [s * top, Math.max((s + sBytes) * top, s * top + 0.7)];
  const [c, e] = [d * bottom, Math.max((d + dBytes) * bottom, d * bottom + 0.7)];
  const middle = height / 2;
  return `M${a},0 C${a},${middle} ${c},${middle} ${c},${height} L${e},${height} C${e},${middle} ${b},${middle} ${b},0 Z`;
}

function drawBands(group, width, top, bottom) {
  const height = 170;
  const segments = group.bands.map((band) => {
    const [leg, s, , d, , copies, nbytes] = band;
    const source = group.sources[leg];
    return {
      band,
      group: leg,
      title:
        copies === 1
          ? `One copy of ${bytes(nbytes)}`
          : `${count(copies)} copies of ${bytes(Math.round(nbytes / copies))} each`,
      facts: [
        [
          "from",
          `${sourceName(group, source)}, block ${Math.floor((s - source.at) / source.block_bytes)}, byte ${count((s - source.at) % source.block_bytes)} of it`,
        ],
        [
          "to",
          `block ${Math.floor(d / group.destination.block_bytes)}, byte ${count(d % group.destination.block_bytes)} of it`,
        ],
        ["in all", bytes(nbytes)],
      ],
    };
  });
  const rects = segments.map((segment) => {
    const path = svg("path", {
      class: `seg band still g${segment.group % 8}`,
      d: bandPath(segment.band, top, bottom, height),
      role: "option",
      tabindex: -1,
      "aria-selected": "false",
      "aria-label": spoken(segment),
    });
    return tells(path, segment);
  });
  rects[0]?.setAttribute("tabindex", 0);
  const node = svg(
    "svg",
    {
      class: "bar bands",
      role: "listbox",
      "aria-label": "Copies",
      "aria-orientation": "horizontal",
      viewBox: `0 0 ${width} ${height}`,
      width,
      height,
    },
    rects,
  );
  node.addEventListener("keydown", (event) => keys(event, rects, segments));
  return node;
}

const draw = redrawn(picture, (width) => {
  const group = data.groups[chosen];
  const most = Math.max(
    group.source_bytes,
    group.destination.num_blocks * group.destination.block_bytes,
  );
  const scale = width / most;
  const top = group.sources.flatMap((source, i) =>
    sideSegments(source, source.at, i, width, scale, `${sourceName(group, source)}: `),
  );
  const bottom = sideSegments(group.destination, 0, 7, width, scale, "");
  tip.hide();
  picture.replaceChildren(
    el(
      "div",
      { class: "lane-name" },
      el(
        "b",
        {},
        `from ${group.sources[0].order}, ${count(group.sources[0].block_tokens)} tokens per block`,
      ),
      el(
        "span",
        {},
        group.sources.map((source, i) =>
          el(
            "span",
            { style: "margin-left:1rem" },
            el("span", { class: `swatch g${i % 8}` }),
            `${sourceName(group, source)}: ${counted(source.num_blocks, "block")}`,
          ),
        ),
      ),
    ),
    bar("Source blocks", top, most, width, 28),
    drawBands(group, width, scale, scale),
    bar("Destination blocks", bottom, most, width, 28),
    el(
      "div",
      { class: "lane-name" },
      el("b", {}, `to ${group.destination.order}, ${count(group.block_tokens)} tokens per block`),
      el(
        "span",
        {},
        `${counted(group.destination.num_blocks, "block")} of ${bytes(group.destination.block_bytes)}`,
      ),
    ),
  );
});

function show() {
  const group = data.groups[chosen];
  tabs.replaceChildren(
    ...data.groups.map((each, i) =>
      el(
        "button",
        {
          type: "button",
          "aria-pressed": i === chosen,
          onclick: () => {
            chosen = i;
            show();
            tabs.children[i].focus();
          },
        },
        each.name,
      ),
    ),
  );
  words.textContent = `${count(group.tokens)} tokens, after which block boundaries meet again: ${counted(group.copies, group.copies === 1 ? "copy" : "copie")} between blocks that have no neighbour beside them. ${group.every > 1 ? `One band in ${group.every} is drawn. ` : ""}Copies too close to tell apart are one band.`;
  draw();
}

hatch();
const { cost } = data;
const quickest = Math.min(cost.seconds, ...cost.cheapest.map(({ seconds }) => seconds));
const winner = cost.cheapest.find((best) => best.seconds === quickest);

mountPage(
  cost.model,
  [
    [
      el("code", {}, cost.from),
      ` (${cost.orders[0]}) → `,
      el("code", {}, cost.to),
      ` (${cost.orders[1]})`,
    ],
  ],
  [
    el(
      "div",
      { class: "tiles" },
      tile(fine(cost.moves_per_block), "copies per destination block, all groups"),
      tile(human(cost.bytes_per_block), "per block"),
      tile(human(cost.min_move_bytes), "the smallest copy"),
      tile(human(cost.max_move_bytes), "the largest copy"),
      tile(
        `about ${seconds(cost.seconds)}`,
        `for ${count(cost.request.tokens)} tokens on ${cost.link.name}, ${cost.way}: ${count(cost.request.moves)} copies, ${human(cost.request.bytes)}`,
      ),
      ...(quickest < cost.seconds
        ? [
            tile(
              `${seconds(cost.seconds - quickest)} less`,
              `with ${winner.orders.join(" → ")}, ${fine(winner.moves_per_block)} copies per block`,
            ),
          ]
        : []),
    ),
    el("h2", {}, "Every copy"),
    tabs,
    words,
    el("div", { class: "card" }, picture),
    el("h2", {}, "Groups"),
    table(
      ["group", "tokens per block", "copies", "bytes", "smallest", "largest"],
      cost.groups.map((group) => ({
        cells: [
          group.name,
          `${group.source_block_tokens.join("/")} → ${group.block_tokens}`,
          fine(group.moves_per_block),
          fine(group.bytes_per_block),
          count(group.min_move_bytes),
          count(group.max_move_bytes),
        ],
      })),
      { caption: "Per destination block" },
    ),
    el("h2", {}, "Ranks to read from"),
    table(
      ["rank", "tp rank", "stage", "copies", "bytes"],
      cost.sources.map((source) => ({
        cells: [
          String(source.rank),
          String(source.tp_rank),
          String(source.pp_rank),
          fine(source.moves_per_block),
          fine(source.bytes_per_block),
        ],
      })),
      { caption: "Their part of a block" },
    ),
    el("h2", {}, "Ways"),
    table(
      ["way", "time"],
      Object.entries(cost.ways).map(([way, time]) => ({
        chosen: cost.way.split(" and ").includes(way),
        cells: [way, seconds(time)],
      })),
      { caption: "The marked one is what an agent takes" },
    ),
    el("h2", {}, "Other orders"),
    table(
      ["with another order", "saved", "time", "copies per block", "from", "to"],
      [
        {
          chosen: quickest === cost.seconds,
          cells: [
            "as given",
            "",
            seconds(cost.seconds),
            fine(cost.moves_per_block),
            ...cost.orders,
          ],
        },
        ...cost.cheapest.map((best) => ({
          chosen: best.seconds === quickest && quickest < cost.seconds,
          cells: [
            { from: "at the source", to: "at the destination", both: "at both" }[best.change],
            best.saved_seconds > 0 ? seconds(best.saved_seconds) : "–",
            seconds(best.seconds),
            fine(best.moves_per_block),
            ...best.orders,
          ],
        })),
      ],
      { left: 1, caption: "The quickest order by the way that an agent takes; the quickest of all is marked" },
    ),
  ],
  {
    made: [
      el(
        "code",
        {},
        `kvstow route ${cost.from} ${cost.to} --link ${cost.link.name} --tokens ${cost.request.tokens}`,
      ),
      `kvstow ${data.kvstow}`,
    ],
  },
);
show();
