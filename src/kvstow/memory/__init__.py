"""Bytes on one machine. Needs torch.

arena          one allocation shaped by a layout, and views into it
allocate       where its bytes come from: host, pinned, shared, a device
adopt          memory that an engine has allocated, checked against a layout
dtypes         element types, ours and torch's
copy           whole blocks, or the copies of a route, between two arenas
cuda           how such a copy runs where a CUDA device is involved
digest         one number for what blocks hold, whatever the layout
digest_keys    the factors that it multiplies bytes by
digest_pages   which pages, heads and states count
digest_device  the sum on a device
digest_cells   the sum of a few cells of a device, by a kernel or by copies to the host
numa           host memory near a device
kernels        Triton kernels: copies, digests, attention
"""
