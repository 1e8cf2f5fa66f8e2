"""Bytes on their way through an engine.

copies   posts, a few at a time, until everything has arrived
slots    many pieces travel as few long ones
"""
