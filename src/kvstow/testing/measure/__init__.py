"""Measurements behind `kvstow bench`.

- `transfer`: pulls against raw NIXL between two processes, as a document
- `baseline`: the same bytes through NIXL alone
- `producer`: the other process
- `setting`: what is moved
- `timed`: a NIXL transport that knows how long it took
"""
