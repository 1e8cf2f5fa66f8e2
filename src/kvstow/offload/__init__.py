"""Rows kept outside the arena: in host memory, on disk, and moved in the background.

Read in this order: `tier`, `policies`, `host`, `files`, `record`, `index`, `disk`, `store`,
`mover`.
"""
