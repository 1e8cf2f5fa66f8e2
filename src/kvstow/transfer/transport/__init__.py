"""Engines that move bytes.

- `base`: what an engine must do
- `local`: the reference engine, inside one process
- `nixl`: the only importer of NIXL
- `parallel`: several engines that work on one transfer
"""
