// A strip: bytes drawn to scale, one or several lanes, each a list of segments.
//
// A segment is {at, nbytes, kind, name, title, facts, group, alt, chosen, act}. `at` is where it
// starts inside the strip. Every segment can be reached with the arrow keys and says what it is.

const BAR_HEIGHT = 34;
const TEXT_WIDTH = 6.8;

function hatch() {
  if (document.getElementById("hatch")) return;
  document.body.append(
    svg(
      "svg",
      { width: 0, height: 0, "aria-hidden": "true", style: "position:absolute" },
      svg(
        "defs",
        {},
        svg(
          "pattern",
          {
            id: "hatch",
            width: 6,
            height: 6,
            patternUnits: "userSpaceOnUse",
            patternTransform: "rotate(45)",
          },
          svg("rect", { width: 6, height: 6, style: "fill:var(--pad)" }),
          svg("line", {
            x1: 0,
            y1: 0,
            x2: 0,
            y2: 6,
            style: "stroke:var(--pad-ink);stroke-width:1.5",
          }),
        ),
      ),
    ),
  );
}

/** `count` equal things in at most as many bins as there is room for: [first, number]. */
function bins(number, width, leastWidth) {
  const most = Math.max(1, Math.floor(width / leastWidth));
  if (number <= most) return Array.from({ length: number }, (_, i) => [i, 1]);
  const step = Math.ceil(number / most);
  return Array.from({ length: Math.ceil(number / step) }, (_, i) => [
    i * step,
    Math.min(step, number - i * step),
  ]);
}

function segmentClass(segment, width) {
  const kind = segment.group === undefined ? segment.kind : `g${segment.group % 8}`;
  return [
    "seg",
    kind,
    segment.alt ? "alt" : "",
    width < 4 ? "thin" : "",
    segment.act ? "" : "still",
  ]
    .filter(Boolean)
    .join(" ");
}

function spoken(segment) {
  return [segment.title, ...segment.facts.map(([what, value]) => `${what} ${value}`)].join(", ");
}

const fitting = (segment, width) =>
  segment.names?.find((text) => text.length * TEXT_WIDTH + 6 < width);

/** Names are written where half of them have room: a few among many look like a mistake. */
function hasRoom(segments, scale) {
  const named = segments.filter((segment) => segment.names?.length);
  return (
    2 * named.filter((segment) => fitting(segment, segment.nbytes * scale)).length >= named.length
  );
}

function drawSegment(segment, scale, height, labelled) {
  const x = segment.at * scale;
  const width = Math.max(segment.nbytes * scale, 1.5);
  const rect = svg("rect", {
    class: segmentClass(segment, width),
    x,
    y: 1,
    width,
    height: height - 2,
    rx: width > 12 ? 3 : 0,
    role: "option",
    tabindex: -1,
    "aria-label": spoken(segment),
    "aria-selected": segment.chosen ? "true" : "false",
  });
  tells(rect, segment);
  if (segment.act) rect.addEventListener("click", () => segment.act());
  const name = labelled && fitting(segment, width);
  const text = name
    ? svg(
        "text",
        {
          class: "seg-name",
          x: x + width / 2,
          y: height / 2 + 4,
          "text-anchor": "middle",
          "aria-hidden": "true",
        },
        name,
      )
    : null;
  return [rect, text];
}

function moveFocus(list, from, to) {
  const target = list[Math.min(Math.max(to, 0), list.length - 1)];
  if (!target) return;
  list[from]?.setAttribute("tabindex", -1);
  target.setAttribute("tabindex", 0);
  target.focus();
}

/** Arrow keys inside a bar; up and down lead to the bars above and below on the page. */
function keys(event, rects, segments) {
  const at = rects.indexOf(event.target);
  if (at < 0) return;
  const steps = {
    ArrowLeft: -1,
    ArrowRight: 1,
    PageUp: -10,
    PageDown: 10,
    Home: -rects.length,
    End: rects.length,
  };
  if (event.key in steps) moveFocus(rects, at, at + steps[event.key]);
  else if (event.key === "Enter" || event.key === " ") segments[at].act?.({ keyboard: true });
  else if (event.key === "ArrowUp" || event.key === "ArrowDown") {
    const bars = [...document.querySelectorAll(".bar[role=listbox]")];
    const next = bars[bars.indexOf(event.currentTarget) + (event.key === "ArrowUp" ? -1 : 1)];
    const target = next?.querySelector('[tabindex="0"]');
    target?.focus();
  } else return;
  event.preventDefault();
}

/** One lane, `width` pixels for `nbytes`. `bar.rects` are its segments on screen, in order. */
function bar(label, segments, nbytes, width, height = BAR_HEIGHT) {
  const scale = width / nbytes;
  const labelled = hasRoom(segments, scale);
  const drawn = segments.map((segment) => drawSegment(segment, scale, height, labelled));
  const rects = drawn.map(([rect]) => rect);
  const first = Math.max(
    0,
    segments.findIndex((segment) => segment.chosen),
  );
  rects[first]?.setAttribute("tabindex", 0);
  const node = svg(
    "svg",
    {
      class: "bar",
      role: "listbox",
      "aria-label": label,
      "aria-orientation": "horizontal",
      viewBox: `0 0 ${width} ${height}`,
      height,
      width,
      "data-bytes": nbytes,
    },
    rects,
    drawn.map(([, text]) => text),
  );
  node.addEventListener("keydown", (event) => keys(event, rects, segments));
  return node;
}

/** The piece above, widened to the whole of what is below. */
function lens(segment, nbytes, width) {
  if (!segment) return null;
  const scale = width / nbytes;
  const [left, right] = [
    segment.at * scale,
    Math.max((segment.at + segment.nbytes) * scale, segment.at * scale + 1.5),
  ];
  return svg(
    "svg",
    { class: "lens", viewBox: `0 0 ${width} 16`, width, height: 16, "aria-hidden": "true" },
    svg("polygon", { points: `${left},0 ${right},0 ${width},16 0,16` }),
  );
}

/** Strips under each other, the chosen piece of each the whole of the next. */
function drawLevels(node, levels, width) {
  const focused = document.activeElement?.closest?.("[data-level]");
  const refocus = focused && node.contains(focused) ? focused.dataset.level : null;
  tip.hide();
  node.replaceChildren(
    ...levels
      .flatMap((level, i) => {
        const chosen = level.lanes
          .flatMap((lane) => lane.segments)
          .find((segment) => segment.chosen);
        const last = i === levels.length - 1;
        return [
          el(
            "section",
            { class: "level", "data-level": level.id },
            el("h3", {}, level.title, el("small", {}, level.detail)),
            level.lanes.map((lane) => [
              lane.name
                ? el(
                    "div",
                    { class: "lane-name" },
                    el("span", {}, lane.swatch ?? null, el("b", {}, lane.name)),
                    el("span", {}, lane.detail ?? ""),
                  )
                : null,
              bar(
                `${level.title}${lane.name ? `, ${lane.name}` : ""}`,
                lane.segments,
                level.nbytes,
                width,
              ),
            ]),
          ),
          last ? null : lens(chosen, level.nbytes, width),
        ];
      })
      .filter(Boolean),
  );
  if (refocus !== null)
    node.querySelector(`[data-level="${refocus}"] [aria-selected="true"]`)?.focus();
}
