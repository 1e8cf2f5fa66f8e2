"""Which rows go first, and which are worth keeping.

policies   LRU, ARC, S3-FIFO behind one interface
queue      slots in an order that changes: what the policies are made of
admission  rows that are seen a second time pass
"""
