"""Everything that touches bytes on one machine.

Read in this order: `backing`, `arena`, `adopt`, `moves`, `copy`, `keys`,
`digest`, `kernels`.
"""
