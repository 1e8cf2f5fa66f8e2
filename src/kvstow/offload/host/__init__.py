"""Rows in host memory.

tier       HostTier: an arena of rows, pinned when CUDA is there
slots      which rows are free, and whose slab is whose
shared     an arena in shared memory, its index and its lock
processes  rows of other processes' shared tiers
"""
