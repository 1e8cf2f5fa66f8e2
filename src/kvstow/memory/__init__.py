"""Bytes on one machine. Needs torch.

arena          one allocation shaped by a layout, and views into it; or an engine's own memory
allocate       where its bytes come from: host, pinned, near a device, on a device
share          the arena of another process of this node, mapped
copy           whole blocks, or the copies of a route, between two arenas
cuda           how such a copy runs where a CUDA device is involved
digest         one number for what blocks hold, whatever the layout
digest_keys    the factors that it multiplies bytes by
kernels        Triton kernels: copies, digests, attention
"""
