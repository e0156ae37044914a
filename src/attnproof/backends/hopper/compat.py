"""Gluon's names, from Triton 3.6 to the newest, in one place: kernels and the launcher import them from here.

3.9 renamed the copies between global and shared memory and made ``aggregate`` public; nothing else that is used here
differs.
"""

from __future__ import annotations

from typing import Any

import triton.language.core as core
from triton._C import libtriton
from triton.experimental import gluon
from triton.experimental.gluon import language as gluon_language
from triton.experimental.gluon.language import _core as gluon_core
from triton.experimental.gluon.language.nvidia import ampere, hopper
from triton.experimental.gluon.nvidia import hopper as host

_builtin: Any = gluon_core.builtin


@_builtin  # pyright: ignore[reportUntypedFunctionDecorator]
def _tma_add(desc: Any, coord: Any, source: Any, _semantic: Any = None) -> None:
    """Add shared memory to a block in global memory: 3.6 can, and has no name for it."""
    at = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        libtriton.ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, at, source.handle
    )


# types of their own would only hide that device code has none
gl: Any = gluon_language
any_value: Any = core.base_value  # annotation of a field that is a tensor, an aggregate or a constant
TensorDescriptor: Any = host.TensorDescriptor
mbarrier: Any = hopper.mbarrier
fence_async_shared: Any = hopper.fence_async_shared
warpgroup_mma: Any = hopper.warpgroup_mma
warpgroup_mma_wait: Any = hopper.warpgroup_mma_wait

aggregate: Any = getattr(gl, "aggregate", None) or core._aggregate  # pyright: ignore[reportPrivateUsage]
tma_load: Any = getattr(hopper.tma, "async_load", None) or hopper.tma.async_copy_global_to_shared
tma_store: Any = getattr(hopper.tma, "async_store", None) or hopper.tma.async_copy_shared_to_global
tma_store_wait: Any = hopper.tma.store_wait
tma_add: Any = getattr(hopper.tma, "async_atomic_add", None) or _tma_add
copy_load: Any = (
    getattr(ampere.async_copy, "async_load", None) or ampere.async_copy.async_copy_global_to_shared
)
copy_arrive: Any = ampere.async_copy.mbarrier_arrive

__all__ = [
    "TensorDescriptor",
    "aggregate",
    "any_value",
    "copy_arrive",
    "copy_load",
    "fence_async_shared",
    "gl",
    "gluon",
    "mbarrier",
    "tma_add",
    "tma_load",
    "tma_store",
    "tma_store_wait",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
