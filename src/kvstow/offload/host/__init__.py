"""Rows in host memory.

tier      HostTier: an arena of rows, pinned when CUDA is there, in slabs that pass between groups
shared    rows that several processes share, and that outlive them
"""
