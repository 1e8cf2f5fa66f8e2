"""Layouts made visible. `text` draws rows and slabs to scale in a terminal."""
