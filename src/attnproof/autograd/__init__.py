"""A call with torch tensors: gradients, transforms and compilation. Imported only when a torch tensor comes in.

    call.py       autocast, validation remembered by structure, and the door that ``torch.compile`` goes through
    function.py   plain eager calls: a backend is run at once, or inside one ``autograd.Function``
    operators.py  everything else (compile, export, vmap, torch.func, fake tensors): operators with fake kernels
    batching.py   what those operators do under vmap

``docs/torch.md`` says what a user may expect of each.
"""

from __future__ import annotations

from .call import call
from .function import attend

__all__ = ["attend", "call"]
