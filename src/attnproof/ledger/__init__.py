"""The ledger: where every byte of an attention call goes, what limits it, and which tiles fit a device.

`hardware` says what a device can do, `traffic` counts the bytes and operations of a call, `cache` says which
of those bytes reach memory, `roofline` turns both into time bounds, `tiles` plans, `lds` counts bank
conflicts, `activations` counts what is kept for the backward pass, `documents` reproduces the source
documents' accounts, `counters` measures.
"""
