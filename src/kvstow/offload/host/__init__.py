"""Rows in host memory.

tier    HostTier: an arena of rows, pinned when CUDA is there
eviction  which rows go first
slots   which rows are free, and whose slab is whose
shared  rows that several processes share, and that outlive them
"""
