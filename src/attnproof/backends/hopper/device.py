"""Whether the kernels can run here: the GPU, Triton's Gluon, and what compiling has shown."""

from __future__ import annotations

import functools
import importlib
import logging
import warnings

import torch
import triton

logger = logging.getLogger(__name__)
CAPABILITY = (9, 0)
_FAILED: list[str] = []  # why kernels do not compile with this Triton, if so


def unsupported() -> str | None:
    """Why the current GPU or the installed Triton cannot serve, or None."""
    if _FAILED:
        return _FAILED[0]
    return _unsupported()


@functools.cache
def _unsupported() -> str | None:
    if torch.version.hip or not torch.cuda.is_available():
        return "needs an NVIDIA GPU that torch can see"
    capability = torch.cuda.get_device_capability()
    if capability != CAPABILITY:
        return f"needs compute capability 9.0 (wgmma and setmaxnreg), got {capability[0]}.{capability[1]}"
    try:
        importlib.import_module(".kernels.forward", __package__)
    except (ImportError, AttributeError) as error:
        return f"needs Gluon as Triton 3.6 to 3.9 have it, and {triton.__version__} differs ({error})"
    return None


def failed(error: Exception) -> None:
    """A kernel did not compile: say so once, and let ``triton`` serve from now on."""
    if _FAILED:
        return
    said = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    _FAILED.append(f"its kernels do not compile with Triton {triton.__version__} ({said})")
    warnings.warn(f"attnproof: hopper: {_FAILED[0]}; triton serves instead", RuntimeWarning, stacklevel=3)


def broken() -> bool:
    """Whether compiling has failed in this process."""
    return bool(_FAILED)


@functools.cache
def say(sentence: str) -> None:
    """Log a sentence, once."""
    logger.warning(sentence)
