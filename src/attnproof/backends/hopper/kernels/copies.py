"""Copies of blocks between global and shared memory, of dense rows or of packed ones (``arguments.ragged``)."""

from ..compat import gl, gluon, tma_load, tma_store
from .rings import FAR


@gluon.constexpr_function
def is_ragged(shape):
    """Whether a block is one of ``arguments.ragged``."""
    return len(shape) == 5


@gluon.jit
def copy_in(desc, place, h, row, full, target):
    """Start the copy of a block into shared memory."""
    RAGGED: gl.constexpr = is_ragged(desc.block_type.shape)
    if RAGGED:
        tma_load(desc, [FAR, place, h, row, 0], full, target)
    else:
        tma_load(desc, [place, h, row, 0], full, target)


@gluon.jit
def copy_out(desc, place, h, row, source):
    """Start the copy of a block from shared memory; what is past the end is dropped."""
    RAGGED: gl.constexpr = is_ragged(desc.block_type.shape)
    if RAGGED:
        tma_store(desc, [FAR, place, h, row, 0], source)
    else:
        tma_store(desc, [place, h, row, 0], source)
