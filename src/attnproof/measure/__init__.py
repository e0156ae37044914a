"""Measuring: only what was judged right is timed."""
