// The address law, as pages need it: where pieces, cells and fields of a layout are.
//
// `look` is what is chosen: {slab, group, row, layer, head, cell, field}. In layouts without slabs
// `row` counts from the start of the arena.

/** `L3` for the third layer's caches; else the end of the name. */
function shortName(name) {
  const parts = name.split(".");
  const number = parts.find((part) => /^\d+$/.test(part));
  return number === undefined ? parts.at(-1).slice(0, 8) : `L${number}`;
}

/** What a cell is of: a token where each has one, else a state that stands for several. */
const cellWord = (kind) => (kind.block_tokens === kind.states ? "token" : "state");

class Drawn {
  constructor(layout, atlas, colours) {
    Object.assign(this, { layout, atlas, colours });
    this.hasSlabs = layout.shared && layout.groups.every((group) => group.row);
  }

  group(g) {
    return this.layout.groups[g];
  }
  colour(g) {
    return this.colours[baseName(this.group(g).name)];
  }
  kind(g, layer) {
    return this.atlas.kinds[this.group(g).kinds[layer]];
  }
  layerName(g, layer) {
    return this.atlas.names[this.group(g).layers[layer]];
  }
  numBlocks(g) {
    return this.layout.num_slabs * this.group(g).rows_per_slab;
  }

  strides(g, layer) {
    const [block, head, token] = this.group(g).strides[this.group(g).stride_of[layer]];
    return { offset: this.group(g).offsets[layer], block, head, token };
  }

  /** The pieces of a page in block 0: {head, at, nbytes}; one, or one per head. */
  pieces(g, layer) {
    const [kind, place] = [this.kind(g, layer), this.strides(g, layer)];
    const slice = kind.states * kind.cell_bytes;
    const whole =
      kind.heads === 1 || place.head === slice || place.token === kind.heads * kind.cell_bytes;
    if (whole) return [{ head: 0, heads: kind.heads, at: place.offset, nbytes: kind.page_bytes }];
    return Array.from({ length: kind.heads }, (_, head) => ({
      head,
      heads: 1,
      at: place.offset + head * place.head,
      nbytes: slice,
    }));
  }

  block(look) {
    return this.hasSlabs ? look.slab * this.group(look.group).rows_per_slab + look.row : look.row;
  }

  /** Head and token of the c-th cell in memory of the chosen piece. */
  cellAt(look, cell) {
    const [kind, place] = [this.kind(look.group, look.layer), this.strides(look.group, look.layer)];
    const piece = this.piece(look);
    if (piece.heads < kind.heads) return [piece.head, cell];
    return place.head > place.token || kind.heads === 1
      ? [Math.floor(cell / kind.states), cell % kind.states]
      : [cell % kind.heads, Math.floor(cell / kind.heads)];
  }

  piece(look) {
    const pieces = this.pieces(look.group, look.layer);
    return pieces[Math.min(look.head, pieces.length - 1)];
  }

  numCells(look) {
    const [kind, piece] = [this.kind(look.group, look.layer), this.piece(look)];
    return piece.heads * kind.states;
  }

  /** What is chosen, brought inside this layout. */
  inside(look) {
    const within = (n, end) => Math.max(0, Math.min(n, end - 1));
    const group = within(look.group, this.layout.groups.length);
    const rows = this.hasSlabs ? this.group(group).rows_per_slab : this.numBlocks(group);
    const kept = {
      ...look,
      group,
      slab: Math.max(1, within(look.slab, this.layout.num_slabs)),
      row: within(look.row, rows),
      layer: within(look.layer, this.group(group).layers.length),
    };
    kept.head = within(look.head, this.pieces(group, kept.layer).length);
    kept.cell = within(look.cell, this.numCells(kept));
    kept.field = within(look.field, this.kind(group, kept.layer).fields.length);
    return kept;
  }

  // ── the law ───────────────────────────────────────────────────────────────────────

  address(look) {
    const place = this.strides(look.group, look.layer);
    const [head, token] = this.cellAt(look, look.cell);
    return (
      place.offset +
      this.block(look) * place.block +
      head * place.head +
      token * place.token +
      this.kind(look.group, look.layer).fields[look.field].offset
    );
  }

  addressInWords(look) {
    const place = this.strides(look.group, look.layer);
    const [head, token] = this.cellAt(look, look.cell);
    const kind = this.kind(look.group, look.layer);
    const field = kind.fields[look.field];
    return `${count(place.offset)} + block ${count(this.block(look))} × ${count(place.block)} + head ${count(head)} × ${count(place.head)} + ${cellWord(kind)} ${count(token)} × ${count(place.token)} + ${field.name} ${count(field.offset)} = ${count(this.address(look))}`;
  }
}
