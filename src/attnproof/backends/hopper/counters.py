"""Pairs of device integers from which programs that stay draw their next tile; the kernel leaves them zero.

Launches that may run at the same time must not share a pair: one per stream, and one per launch that is captured into a
graph, because a graph may be replayed on any stream.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

PAIRS = 4096  # captured launches take turns: only graphs this many launches apart could meet
STEP = 8  # int32 from one pair to the next, so that no two share a 32-byte sector

_slabs: dict[int, Any] = {}
_of_stream: dict[tuple[int, int], Any] = {}
_turns = itertools.count()


def pair(device: int, stream: int) -> Any:
    """Counters for a launch on the current stream of a device, int32 [2]."""
    if torch.cuda.is_current_stream_capturing():
        if device not in _slabs:
            # nothing may be kept from a graph's own memory; its zeros are part of the graph
            return torch.zeros(2, dtype=torch.int32, device=f"cuda:{device}")
        return _slabs[device][next(_turns) % PAIRS]
    key = (device, stream)
    found = _of_stream.get(key)
    if found is None:
        if device not in _slabs:
            _slabs[device] = torch.zeros(PAIRS, STEP, dtype=torch.int32, device=f"cuda:{device}")
        # not from the slab: a stream's pair is its own for ever
        found = _of_stream[key] = torch.zeros(2, dtype=torch.int32, device=f"cuda:{device}")
    return found
