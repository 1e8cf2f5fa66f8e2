// A layout as strips: arena, slab, row, page and cell, each the chosen piece of the one above.

class Zoom extends Drawn {
  levels(look, width, choose) {
    const [kind, group] = [this.kind(look.group, look.layer), this.group(look.group)];
    return [
      ...(this.hasSlabs
        ? [this.arena(look, width, choose), this.slab(look, width, choose)]
        : [this.regions(look, choose), this.region(look, width, choose)]),
      group.row ? this.row(look, choose) : null,
      this.numCells(look) > 1 ? this.page(look, width, choose) : null,
      kind.fields.length ? this.cell(look, choose) : null,
    ].filter(Boolean);
  }

  // ── arena and slabs

  arena(look, width, choose) {
    const { slab_bytes: size, num_slabs: number, arena_bytes: nbytes } = this.layout;
    const free = bins(number - 1, width, 7).map(([first, many]) => ({
      at: (first + 1) * size,
      nbytes: many * size,
      kind: "plain",
      alt: (first / many) % 2 === 1,
      names: many === 1 ? [`slab ${first + 1}`, String(first + 1)] : [],
      title:
        many === 1
          ? `Slab ${count(first + 1)}`
          : `Slabs ${count(first + 1)} to ${count(first + many)}`,
      facts: [
        ["offset", bytes((first + 1) * size)],
        ["each", bytes(size)],
        ["owner", "one group at a time, any of them"],
      ],
      chosen: look.slab > first && look.slab <= first + many,
      act: () => choose({ slab: first + 1 }),
    }));
    const nobody = {
      at: 0,
      nbytes: size,
      kind: "null",
      names: ["slab 0"],
      title: "Slab 0 belongs to nobody",
      facts: [
        ["offset", "0"],
        ["bytes", bytes(size)],
        ["holds", "block 0 of every group: the null row"],
      ],
    };
    const per = free[0]?.nbytes / size;
    return {
      id: "arena",
      title: "Arena",
      nbytes,
      detail: `${bytes(nbytes)}, one region, ${counted(number, "slab")}${per > 1 ? `; each mark is ${count(per)} of them` : ""}`,
      lanes: [{ segments: [nobody, ...free] }],
    };
  }

  slab(look, width, choose) {
    const size = this.layout.slab_bytes;
    return {
      id: "slab",
      title: `Slab ${count(look.slab)}`,
      nbytes: size,
      detail:
        this.layout.groups.length > 1
          ? `${bytes(size)}; it belongs to one of these groups at a time, which cuts it into its own rows`
          : bytes(size),
      lanes: this.layout.groups.map((group, g) => ({
        name: group.name,
        swatch: el("span", { class: `swatch g${this.colour(g)}` }),
        detail: `${counted(group.rows_per_slab, "row")} of ${count(group.block_tokens)} tokens`,
        segments: this.rowSegments(
          g,
          look,
          width,
          group.rows_per_slab,
          look.slab * group.rows_per_slab,
          choose,
        ),
      })),
    };
  }

  // ── layouts without slabs: parts of the arena, then the blocks in one of them

  regions(look, choose) {
    const nbytes = this.layout.arena_bytes;
    return {
      id: "arena",
      title: "Arena",
      nbytes,
      detail: `${bytes(nbytes)}, one region; ${this.layout.groups.every((group) => group.row) ? "every group has its own part" : "a block is in several places"}`,
      lanes: this.layout.groups.map((group, g) => ({
        name: group.name,
        swatch: el("span", { class: `swatch g${this.colour(g)}` }),
        detail: `${counted(this.numBlocks(g), "block")} of ${count(group.block_tokens)} tokens`,
        segments: this.regionSegments(g, look, choose),
      })),
    };
  }

  regionSegments(g, look, choose) {
    const [group, number] = [this.group(g), this.numBlocks(g)];
    if (group.row) {
      const [at, , stride] = group.row;
      return [
        {
          at,
          nbytes: stride * number,
          group: this.colour(g),
          names: ["rows"],
          title: `${group.name}: all rows`,
          facts: [
            ["offset", bytes(at)],
            ["bytes", bytes(stride * number)],
            ["blocks", count(number)],
          ],
          chosen: look.group === g,
          act: () => choose({ group: g, row: Math.min(look.row, number - 1), layer: 0 }),
        },
      ];
    }
    return group.layers
      .flatMap((_, layer) =>
        this.pieces(g, layer).map((piece, p) => {
          const [name, stride] = [this.layerName(g, layer), this.strides(g, layer).block];
          return {
            at: piece.at,
            nbytes: stride * number,
            group: this.colour(g),
            alt: (layer + p) % 2 === 1,
            names: [shortName(name)],
            title: piece.heads < this.kind(g, layer).heads ? `${name}, head ${piece.head}` : name,
            facts: [
              ["offset", bytes(piece.at)],
              ["bytes", bytes(stride * number)],
              ["blocks", count(number)],
              ["keeps", group.keeps],
            ],
            chosen:
              look.group === g &&
              look.layer === layer &&
              Math.min(look.head, this.pieces(g, layer).length - 1) === p,
            act: () => choose({ group: g, layer, head: p }),
          };
        }),
      )
      .sort((a, b) => a.at - b.at);
  }

  region(look, width, choose) {
    const [group, number] = [this.group(look.group), this.numBlocks(look.group)];
    if (group.row) {
      return {
        id: "region",
        title: `Rows of ${group.name}`,
        nbytes: group.row_stride * number,
        detail: `${counted(number, "block")} of ${bytes(group.row_bytes)}`,
        lanes: [{ segments: this.rowSegments(look.group, look, width, number, 0, choose) }],
      };
    }
    const [stride, piece, name] = [
      this.strides(look.group, look.layer).block,
      this.piece(look),
      this.layerName(look.group, look.layer),
    ];
    const segments = bins(number, width, 5).map(([first, many]) => ({
      at: first * stride,
      nbytes: many * stride,
      group: this.colour(look.group),
      alt: (first / many) % 2 === 1,
      names: many === 1 ? [`block ${first}`, String(first)] : [],
      title:
        many === 1
          ? `Block ${count(first)}`
          : `Blocks ${count(first)} to ${count(first + many - 1)}`,
      facts: [
        ["offset", bytes(piece.at + first * stride)],
        ["each", bytes(piece.nbytes)],
        ["layer", name],
      ],
      chosen: look.row >= first && look.row < first + many,
      act: () => choose({ row: first }),
    }));
    return {
      id: "region",
      title: "Region",
      nbytes: stride * number,
      detail: `${name}: ${counted(number, "block")}, ${bytes(piece.nbytes)} of each`,
      lanes: [{ segments }],
    };
  }

  // ── rows

  /** Rows side by side, each with the padding behind it; bins of rows where there are many. */
  rowSegments(g, look, width, number, firstBlock, choose) {
    const group = this.group(g);
    const base = group.row[0] + firstBlock * group.row_stride;
    const padding = group.row_stride - group.row_bytes;
    return bins(number, width, 5).flatMap(([first, many]) => {
      const [block, at] = [firstBlock + first, first * group.row_stride];
      const row = {
        at,
        nbytes: many === 1 ? group.row_bytes : many * group.row_stride,
        group: this.colour(g),
        alt: (first / many) % 2 === 1,
        names: many === 1 ? [`row ${first}`, String(first)] : [],
        title:
          many === 1
            ? `${group.name}: block ${count(block)}${this.hasSlabs ? `, row ${count(first)} of its slab` : ""}`
            : `${group.name}: blocks ${count(block)} to ${count(block + many - 1)}`,
        facts: [
          ["offset", bytes(base + at)],
          ["row", bytes(group.row_bytes)],
          ["padding", bytes(padding)],
          ["keeps", group.keeps],
          ["tokens", count(group.block_tokens)],
          ["pages", count(group.num_layers)],
        ],
        chosen: look.group === g && look.row >= first && look.row < first + many,
        act: () => choose({ group: g, row: first, layer: look.group === g ? look.layer : 0 }),
      };
      return padding && many === 1
        ? [row, this.gap(at + group.row_bytes, padding, base + at + group.row_bytes)]
        : [row];
    });
  }

  gap(at, nbytes, offset) {
    return {
      at,
      nbytes,
      kind: "padding",
      title: "Padding",
      names: [],
      facts: [
        ["offset", bytes(offset)],
        ["bytes", bytes(nbytes)],
      ],
    };
  }

  row(look, choose) {
    const group = this.group(look.group);
    const [start, , stride] = group.row;
    const base = start + this.block(look) * stride;
    const found = group.layers
      .flatMap((_, layer) =>
        this.pieces(look.group, layer).map((piece, p) => ({ layer, p, piece })),
      )
      .sort((a, b) => a.piece.at - b.piece.at);
    const segments = [];
    let end = 0;
    for (const [i, { layer, p, piece }] of found.entries()) {
      const at = piece.at - start;
      if (at > end) segments.push(this.gap(end, at - end, base + end));
      segments.push(this.pageSegment(look, layer, p, piece, at, base + at, i % 2 === 1, choose));
      end = at + piece.nbytes;
    }
    if (end < stride) segments.push(this.gap(end, stride - end, base + end));
    return {
      id: "row",
      title: `Row of block ${count(this.block(look))}`,
      nbytes: stride,
      detail: `${group.name}: ${counted(group.num_layers, "page")}, ${bytes(group.row_bytes)} in one piece${found.length > group.layers.length ? "; heads outermost, each of all layers" : ""}`,
      lanes: [{ segments }],
    };
  }

  pageSegment(look, layer, p, piece, at, offset, alt, choose) {
    const [kind, name] = [this.kind(look.group, layer), this.layerName(look.group, layer)];
    const sliced = piece.heads < kind.heads;
    return {
      at,
      nbytes: piece.nbytes,
      group: this.colour(look.group),
      alt,
      names: sliced
        ? [`${shortName(name)} h${piece.head}`, `h${piece.head}`]
        : [name, shortName(name)],
      title: sliced ? `${name}, head ${piece.head}` : name,
      facts: [
        ["offset", bytes(offset)],
        ["in the row", bytes(at)],
        ["bytes", bytes(piece.nbytes)],
        ["fields", kind.fields.map((field) => field.name).join(", ")],
        [
          "cells",
          `${counted(piece.heads, "head")} × ${counted(kind.states, cellWord(kind))} of ${bytes(kind.cell_bytes)}`,
        ],
        ["keeps", kind.keeps],
      ],
      chosen:
        look.layer === layer &&
        Math.min(look.head, this.pieces(look.group, layer).length - 1) === p,
      act: () => choose({ layer, head: p }),
    };
  }

  // ── pages and cells

  page(look, width, choose) {
    const [kind, piece, name] = [
      this.kind(look.group, look.layer),
      this.piece(look),
      this.layerName(look.group, look.layer),
    ];
    const cells = this.numCells(look);
    const [firstHead] = kind.head_pieces[0];
    const segments = bins(cells, width, 5).map(([first, many]) => {
      const [head, token] = this.cellAt(look, first);
      const outer =
        kind.states > 1 && kind.heads > 1
          ? this.strides(look.group, look.layer).head > this.strides(look.group, look.layer).token
            ? head
            : token
          : first / many;
      return {
        at: first * kind.cell_bytes,
        nbytes: many * kind.cell_bytes,
        group: this.colour(look.group),
        alt: outer % 2 === 1,
        names:
          many === 1
            ? [
                `head ${head} ${cellWord(kind)} ${token}`,
                `h${head} n${token}`,
                kind.heads === 1 ? String(token) : `${head},${token}`,
              ]
            : [],
        title: `${many === 1 ? "Cell" : `${count(many)} cells from`} head ${count(head)}, ${cellWord(kind)} ${count(token)}`,
        facts: [
          ["offset", bytes(this.address({ ...look, cell: first }))],
          ["bytes", bytes(many * kind.cell_bytes)],
          ["head", `${count(firstHead + head)} of ${count(kind.heads_in_all)} in the whole model`],
          [
            cellWord(kind),
            kind.block_tokens === kind.states
              ? `token ${count(token)} of the block`
              : `stands for ${count(kind.block_tokens / kind.states)} tokens`,
          ],
        ],
        chosen: look.cell >= first && look.cell < first + many,
        act: () => choose({ cell: first }),
      };
    });
    const payload = cells * kind.cell_bytes;
    if (piece.nbytes > payload)
      segments.push(
        this.gap(
          payload,
          piece.nbytes - payload,
          this.address({ ...look, cell: 0, field: 0 }) + payload,
        ),
      );
    return {
      id: "page",
      title: "Page",
      nbytes: piece.nbytes,
      lanes: [{ segments }],
      detail: `${name}${piece.heads < kind.heads ? `, head ${piece.head}` : ""}: ${counted(piece.heads, "head")} × ${counted(kind.states, cellWord(kind))}, ${bytes(piece.nbytes)}`,
    };
  }

  cell(look, choose) {
    const kind = this.kind(look.group, look.layer);
    const base = this.address({ ...look, field: 0 }) - kind.fields[0].offset;
    const [head, token] = this.cellAt(look, look.cell);
    const segments = kind.fields.map((field, f) => ({
      at: field.offset,
      nbytes: field.nbytes,
      group: this.colour(look.group),
      alt: f % 2 === 1,
      names: [
        `${field.name}: ${field.axes.map(([axis, size]) => `${size} ${axis}`).join(" × ")} ${field.dtype}`,
        field.name,
        field.name.slice(0, 2),
      ],
      title: `Field ${field.name}`,
      facts: [
        ["offset", bytes(base + field.offset)],
        ["bytes", bytes(field.nbytes)],
        ["elements", field.dtype],
        ["axes", field.axes.map(([axis, size]) => `${axis} ${count(size)}`).join(" × ")],
        ["layer", this.layerName(look.group, look.layer)],
        ["keeps", kind.keeps],
      ],
      chosen: f === look.field,
      act: () => choose({ field: f }),
    }));
    const last = kind.fields.at(-1);
    const end = last.offset + last.nbytes;
    if (end < kind.cell_bytes) segments.push(this.gap(end, kind.cell_bytes - end, base + end));
    return {
      id: "cell",
      title:
        this.numCells(look) > 1
          ? `Cell: head ${count(head)}, ${cellWord(kind)} ${count(token)}`
          : "Page: one cell",
      nbytes: kind.cell_bytes,
      detail: `${bytes(kind.cell_bytes)}: ${counted(kind.fields.length, "field")}`,
      lanes: [{ segments }],
    };
  }
}
