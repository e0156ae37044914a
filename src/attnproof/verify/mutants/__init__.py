"""Broken kernels, to measure how much the verifier catches.

An operator is a small change of the streaming kernel's source (`recurrence`, `masking`, `addressing`, `gradients`), or
of what surrounds a kernel (`behaviour`). `kernel` builds the broken kernel and runs it, `matrix` tells which case
kills which.
"""
