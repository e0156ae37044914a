"""Adapters: how each known kernel is called, and what it documents that it does not do.

One module per family. `build(name)` of each returns a `Candidate`, or raises `Skip` with the reason why it cannot run
here. Nothing optional is imported before it is asked for.
"""
