from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import numpy as np
import pytest

from attnproof import AttentionError, BackendMissing, DtypeError, ShapeError, Unsupported, attention

ERRORS = [
    ShapeError("k: expected head dim 64 to match q, got 80"),
    DtypeError("k: expected dtype float32 to match q, got float64"),
    Unsupported("triton", "float64 is served by native and streaming"),
    BackendMissing("torch: needed by this backend"),
]


def test_each_error_is_the_builtin_that_a_caller_would_catch() -> None:
    builtins = {ShapeError: ValueError, DtypeError: TypeError, Unsupported: NotImplementedError}
    for error, builtin in {**builtins, BackendMissing: ImportError}.items():
        assert issubclass(error, builtin)
        assert issubclass(error, AttentionError)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_an_error_survives_a_process_boundary(
    error: Exception, copied: Callable[[Exception], Exception]
) -> None:
    """A worker's error would otherwise arrive as a TypeError about the error's own constructor."""
    other = copied(error)
    assert (type(error), str(error), vars(error)) == (type(other), str(other), vars(other))


def test_a_refusal_names_backend_and_reason() -> None:
    assert "triton: float64 is served by native and streaming" == str(ERRORS[2])
    assert ("triton", "float64 is served by native and streaming") == (ERRORS[2].backend, ERRORS[2].reason)


def test_a_message_names_the_argument_what_was_expected_and_what_came() -> None:
    q, k = np.zeros((1, 1, 2, 64)), np.zeros((1, 1, 2, 80))
    with pytest.raises(ShapeError) as caught:
        attention(q, k, k)
    assert "k: expected head dim 64 to match q, got 80" == str(caught.value)
