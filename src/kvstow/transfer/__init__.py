"""Rows between processes and machines, and never silently wrong.

Read in this order: `transport` (what an engine must do), `local` and `nixl` (two engines),
`ticket`, `lease` and `rows` (what may be read, and until when), `wire` and `channel` (the
side channel), `links`, `serving` and `pulling` (the two halves of a transfer), `agent`.
"""
