"""Bytes on their way.

copies   posts, a few at a time, until everything has arrived
rows     rows read whole and cut here, where that is cheaper than many small reads
staged   rows without a direct path go through host memory
"""
