"""Bytes on their way.

copies   posts, a few at a time, until everything has arrived
staged   rows without a direct path go through host memory
"""
