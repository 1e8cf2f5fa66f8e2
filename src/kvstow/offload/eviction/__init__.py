"""Which rows go first, and which are worth keeping.

policies   LRU, ARC, S3-FIFO behind one interface
admission  rows that are seen a second time pass
"""
