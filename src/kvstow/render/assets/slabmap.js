// Slabs as squares: who owns which, and how many of its rows are held.

const FULLNESS = [
  "no row held",
  "up to half of its rows held",
  "more than half held",
  "every row held",
];
const STRENGTH = [0.35, 0.6, 0.8, 1];
const colourOf = {};
const groupColour = (group) => (colourOf[baseName(group)] ??= Object.keys(colourOf).length % 8);

/** A letter says who owns a slab and how full it is; see SlabMap in kvstow.blocks.slabs. */
function decoded(letter) {
  const code = letter.charCodeAt(0) - 33;
  return { owner: Math.floor(code / 4) - 1, level: code % 4 };
}

/** `{groups, step, num_slabs}` of one pool, drawn again by `show(letters)`. */
function slabMap(name, map) {
  const canvas = el("canvas", { role: "img", style: "width:100%;display:block", tabindex: 0 });
  const words = el("p", { class: "soft" });
  let [letters, place] = ["", null];
  const paint = (width) => {
    if (!letters) return;
    const cell = Math.max(5, Math.min(18, Math.floor(Math.sqrt((width * 170) / letters.length))));
    const across = Math.max(1, Math.floor(width / cell));
    const height = Math.ceil(letters.length / across) * cell;
    const dense = window.devicePixelRatio || 1;
    Object.assign(canvas, { width: width * dense, height: height * dense });
    canvas.style.height = `${height}px`;
    const brush = canvas.getContext("2d");
    brush.scale(dense, dense);
    const fills = map.groups.map((group) => resolved(`--g${groupColour(group)}`));
    const nobody = resolved("--null");
    [...letters].forEach((letter, i) => {
      const { owner, level } = decoded(letter);
      brush.globalAlpha = owner < 0 ? 0.45 : STRENGTH[level];
      brush.fillStyle = owner < 0 ? nobody : fills[owner];
      brush.fillRect((i % across) * cell, Math.floor(i / across) * cell, cell - 1, cell - 1);
    });
    place = { cell, across };
  };
  const tell = () => {
    const counts = new Map();
    for (const letter of letters)
      counts.set(decoded(letter).owner, (counts.get(decoded(letter).owner) ?? 0) + 1);
    words.textContent = [...counts]
      .sort(([a], [b]) => a - b)
      .map(
        ([owner, number]) =>
          `${owner < 0 ? "nobody" : map.groups[owner]} ${percent(number / letters.length)}`,
      )
      .join(", ");
    canvas.setAttribute("aria-label", `${name}, owners of slabs: ${words.textContent}`);
  };
  const draw = redrawn(canvas, paint);
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const at = place
      ? Math.floor((event.clientY - box.top) / place.cell) * place.across +
        Math.floor((event.clientX - box.left) / place.cell)
      : -1;
    if (at < 0 || at >= letters.length) return tip.hide();
    const { owner, level } = decoded(letters[at]);
    return tip.show(
      canvas,
      `Slab ${count(at * map.step + 1)}`,
      [
        ["owner", owner < 0 ? "nobody" : map.groups[owner]],
        ["rows", FULLNESS[level]],
      ],
      event,
    );
  });
  canvas.addEventListener("pointerleave", () => tip.hide());
  const note = map.step > 1 ? `; one in ${map.step} is drawn` : "";
  map.groups.forEach(groupColour);
  return {
    node: el(
      "section",
      { class: "level" },
      el("h3", {}, name, el("small", {}, `${counted(map.num_slabs, "slab")}${note}`)),
      canvas,
      words,
    ),
    show(now) {
      letters = now;
      draw();
      tell();
    },
    draw,
  };
}

const slabLegend = () =>
  el(
    "ul",
    { class: "legend" },
    Object.entries(colourOf).map(([name, colour]) =>
      el("li", {}, el("span", { class: `swatch g${colour}` }), name),
    ),
    el("li", {}, el("span", { class: "swatch null" }), "nobody"),
  );
