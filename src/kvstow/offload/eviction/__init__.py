"""Which rows go first.

policies   LRU and S3-FIFO behind one interface
"""
