"""The door that ``torch.compile`` goes through; imported when something is compiled.

The compiler reads ``call`` below, which only takes the arguments apart. ``_traced`` it does not read: it runs it on
fake tensors, where validation and dispatch work as they do eagerly and end in an operator, which is what the graph
keeps. Sizes may be symbols there; a float is made a constant of the graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..masks import Explicit, Mask, Prefix, as_mask
from ..problem import Options
from .call import run


def call(kind: str, arrays: tuple[Any, ...], options: Options) -> tuple[Tensor, Tensor]:
    """As ``autograd.call``: the arguments as what may enter a graph, tensors, numbers, words and tuples of them."""
    mask = as_mask(options.mask)
    terms: tuple[tuple[Any, ...], ...] = ()
    for term in mask.terms:
        if isinstance(term, Explicit):
            # as inputs of the graph: another mask of the same size needs no other compilation
            terms += (("explicit", torch.from_numpy(term.lo), torch.from_numpy(term.hi), term.keys),)
        elif isinstance(term, Prefix):
            terms += (("prefix", term.lengths),)
    band = (mask.left, mask.right, mask.top_left)
    return _traced(kind, arrays, tuple(options._replace(mask=None)), band, terms, mask.keep)


@torch.compiler.allow_in_graph
def _traced(
    kind: str,
    arrays: tuple[Any, ...],
    options: tuple[Any, ...],
    band: tuple[int, int, bool],
    terms: tuple[tuple[Any, ...], ...],
    keep: tuple[Tensor, ...],
) -> tuple[Tensor, Tensor]:
    made = tuple(Prefix(*parts) if name == "prefix" else Explicit(*parts) for name, *parts in terms)
    mask = Mask(*band, terms=made, keep=tuple(keep))
    fixed: list[Any] = [float(x) if isinstance(x, torch.SymFloat) else x for x in options]
    return run(kind, tuple(arrays), Options(*fixed)._replace(mask=mask))
