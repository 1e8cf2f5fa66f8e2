"""Pure planning: integers in, integers out.

Read in this order: `view`, `spec`, `group`, `laws`, `layout`, `slab`, `pack`, `route`.
"""
