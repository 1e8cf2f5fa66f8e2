"""Engines that move bytes.

- `base`: what an engine must do
- `local`: the reference engine, inside one process
- `nixl`: the only importer of NIXL
- `mapped`: memory of a peer on this node as memory of ours
"""
