// The chosen layout against others: the table, and one block of every group to one scale.


/** The layouts that are set against each other, the chosen one first. */
function compared() {
  const known = [
    ["slabs of tight rows (kvstow)", "BLHNC", "slab"],
    ["one row per slab, as long as the longest", "BLHNC", "union"],
    ["nothing shared, rows", "BLHNC", "separate"],
    ["each layer by itself, keys and values together", "LBHNC", "separate"],
  ];
  const isKnown = known.some(
    ([, order, packing]) => order === state.order && packing === state.packing,
  );
  return (isKnown ? known : [["as chosen above", state.order, state.packing], ...known]).map(
    ([words, order, packing]) => ({ words, order, packing, layout: layoutOf(order, packing) }),
  );
}

/** What engines with a tensor for keys and one for values of every layer hand over. */
function perLayerRow(columns) {
  const { descriptors_per_block: copies, bytes_per_descriptor_max: most } = plannedNow().per_layer;
  const words = "each layer by itself, keys and values apart";
  return { cells: [words, "", count(copies), human(most), "", ...Array(columns).fill("")] };
}

function showCompared() {
  const lengths = [...new Set([state.length, 131072])]; // the chosen one, and a long one
  const all = compared();
  const most = lengths.map((n) =>
    Math.max(1, ...all.map(({ layout }) => (layout.error ? 0 : atLength(layout.requests, n)))),
  );
  parts.compare.replaceChildren(
    table(
      [
        "layout",
        "order",
        "copies per block",
        "bytes per copy",
        "padding",
        ...lengths.map((n) => `requests of ${count(n)}`),
      ],
      all.map(({ words, order, packing, layout }) => ({
        chosen: order === state.order && packing === state.packing,
        cells: layout.error
          ? [words, order, layout.error, "", "", "", ""]
          : [
              words,
              order,
              count(Math.max(...layout.copies)),
              human(
                Math.max(...layout.groups.map((group, g) => group.row_bytes / layout.copies[g])),
              ),
              percent(Math.max(...layout.padding)),
              ...lengths.map((n, i) => [
                count(atLength(layout.requests, n)),
                el("span", {
                  class: "meter",
                  style: `width:${(100 * atLength(layout.requests, n)) / most[i]}%`,
                }),
              ]),
            ],
      })).concat([perLayerRow(lengths.length)]),
      { left: 2, caption: "Copies, bytes and padding are those of the worst group" },
    ),
  );
}

/** One block of every group in each compared layout, all to one scale. */
function drawRows(width) {
  const all = compared().filter(({ layout }) => !layout.error);
  const longest = Math.max(
    ...all.flatMap(({ layout }) => layout.groups.map((group) => group.row_stride)),
  );
  parts.rows.replaceChildren(
    ...all.map(({ words, layout }) => {
      const drawn = new Drawn(layout, atlas, colours);
      return el(
        "section",
        { class: "level" },
        el("h3", {}, words),
        layout.groups.map((group, g) => {
          const pieces = group.layers.flatMap((_, layer) =>
            drawn.pieces(g, layer).map((piece) => ({ layer, piece })),
          );
          let end = 0;
          const block = group.row
            ? [
                {
                  at: 0,
                  nbytes: group.row_bytes,
                  group: drawn.colour(g),
                  names: [group.name],
                  title: `${group.name}: one block, one piece`,
                  facts: [
                    ["bytes", bytes(group.row_bytes)],
                    ["tokens", count(group.block_tokens)],
                  ],
                },
              ]
            : pieces.map(({ layer, piece }, i) => ({
                at: (end += piece.nbytes) - piece.nbytes,
                nbytes: piece.nbytes,
                group: drawn.colour(g),
                alt: i % 2 === 1,
                names: [],
                title: `${group.name}: piece ${i + 1} of ${pieces.length}`,
                facts: [
                  ["layer", drawn.layerName(g, layer)],
                  ["bytes", bytes(piece.nbytes)],
                ],
              }));
          const padding = group.row_stride - group.row_bytes;
          if (padding)
            block.push({
              at: group.row_bytes,
              nbytes: padding,
              kind: "padding",
              names: ["padding"],
              title: "Padding",
              facts: [
                ["bytes", bytes(padding)],
                ["part", percent(padding / group.row_stride)],
              ],
            });
          return bar(`${words}, ${group.name}`, block, longest, width, 16);
        }),
      );
    }),
  );
}
