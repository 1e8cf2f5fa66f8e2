"""Bytes on their way.

copies   posts, a few at a time, until everything has arrived
gather   short copies gathered by the producer, where that saves many small writes
rows     rows read whole and cut here, where that is cheaper than many small reads
staged   rows without a direct path go through host memory
"""
