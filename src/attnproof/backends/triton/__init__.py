"""Triton backend: every GPU that Triton serves, forward, backward and decode."""
