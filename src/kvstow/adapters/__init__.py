"""Engines that keep their caches in kvstow rows: one package per engine, imported by nobody."""
