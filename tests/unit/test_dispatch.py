from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

import attnproof
from attnproof import ShapeError, Unsupported, attention, dispatch, explain
from attnproof.backends import reference, streaming
from attnproof.problem import Options, Problem, bind, bind_decode

Q = np.zeros((1, 2, 3, 4), np.float32)
PROBLEM = bind(Q, Q, Q, Options()).problem


@pytest.fixture
def only_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order as it is when no compiled backend is there."""
    monkeypatch.setattr(dispatch, "ORDER", ("streaming", "reference"))


def test_backends_are_named_in_dispatch_order_and_the_oracle_is_last() -> None:
    names = attnproof.backends()
    assert len(names) == len(set(names))
    assert "streaming" in names
    assert "reference" == names[-1]


def test_every_backend_has_the_five_names() -> None:
    """A backend that cannot be imported at all must still say so in a sentence, through why_not or ImportError."""
    for name in attnproof.backends():
        try:
            backend = dispatch.load(name)
        except ImportError as error:
            assert len(str(error).split()) > 2
        else:
            assert name == backend.name
            assert backend.kind in ("numpy", "torch")
            assert all(callable(getattr(backend, at)) for at in ("why_not", "forward", "backward"))


@pytest.mark.usefixtures("only_two")
def test_auto_takes_the_first_that_does_not_refuse() -> None:
    assert streaming is dispatch.choose(PROBLEM)
    assert reference is dispatch.choose(PROBLEM, "reference")


def test_a_problem_that_was_sent_to_another_process_is_found_again_there() -> None:
    """Its hash is remembered, and strings hash otherwise there: sent along, it would hide every plan."""
    sent = subprocess.run(
        [
            sys.executable,
            "-c",
            "import pickle, sys; a, b = pickle.load(sys.stdin.buffer); print(hash(a) == hash(b))",
        ],
        input=pickle.dumps((PROBLEM, _fresh(PROBLEM))),
        capture_output=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "7"},
    )
    assert b"True" == sent.stdout.strip()


def _fresh(problem: Problem) -> Problem:
    """An equal problem that has not been hashed."""
    hash(problem)
    return replace(problem)


@pytest.mark.parametrize("name", sorted(dispatch.NEVER_AUTO))
def test_what_is_only_for_who_names_it_is_passed_over(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch.load(name), "why_not", lambda problem: None)
    assert name == dispatch.choose(PROBLEM, name).name
    assert dispatch.choose(PROBLEM).name not in dispatch.NEVER_AUTO


@pytest.mark.usefixtures("only_two")
def test_auto_never_takes_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    """It materialises N x N: a call that used to fit in memory would stop to do so, silently."""
    monkeypatch.setattr(streaming, "why_not", lambda problem: "it is closed today")
    with pytest.raises(Unsupported, match=r"^auto: streaming: it is closed today$"):
        attention(Q, Q, Q)
    assert Q.shape == attention(Q, Q, Q, backend="reference").shape


@pytest.mark.usefixtures("only_two")
def test_a_named_backend_that_refuses_never_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "why_not", lambda problem: "it is closed today")
    with pytest.raises(Unsupported, match=r"^streaming: it is closed today$") as caught:
        attention(Q, Q, Q, backend="streaming")
    assert ("streaming", "it is closed today") == (caught.value.backend, caught.value.reason)


def test_an_unknown_backend_lists_the_known_ones() -> None:
    names = ", ".join(attnproof.backends())
    for call in (attention, explain):
        with pytest.raises(ShapeError, match=f"^backend: expected 'auto' or one of {names}, got 'cudnn'$"):
            call(Q, Q, Q, backend="cudnn")


@pytest.mark.usefixtures("only_two")
def test_explain_shows_the_whole_table(monkeypatch: pytest.MonkeyPatch) -> None:
    found = explain(Q, Q, Q)
    assert ("streaming", {"streaming": None, "reference": None}) == (found.chosen, found.reasons)
    assert "-> streaming  chosen\n   reference  would serve it; runs only when named" == str(found)
    named = explain(Q, Q, Q, backend="reference")
    assert "   streaming  would serve it; comes later in the order\n-> reference  chosen" == str(named)
    monkeypatch.setattr(streaming, "why_not", lambda problem: "it is closed today")
    for name, lines in {
        "auto": ["   streaming  it is closed today", "   reference  would serve it; runs only when named"],
        "streaming": [
            "   streaming  it is closed today",
            "   reference  would serve it; runs only when named",
        ],
    }.items():
        refused = explain(Q, Q, Q, backend=name)
        assert (None, lines) == (refused.chosen, str(refused).splitlines())


def test_the_numpy_backend_says_where_tensors_must_be() -> None:
    from dataclasses import replace

    reason = streaming.why_not(replace(PROBLEM, device="cuda"))
    assert "reads host memory, and the tensors are on cuda; use .cpu() or another backend" == reason
    assert reference.why_not(replace(PROBLEM, device="cuda")) is None


@pytest.mark.parametrize("name", ["streaming", "reference"])
def test_pages_have_no_backward(name: str) -> None:
    """Pages are read through copies: a sum into a copy would come back as zeros."""
    pages, table = Q.reshape(1, 2, 3, 4), np.array([[0]])
    bound = bind_decode(Q, pages, pages, np.array([3]), table, Options())
    with pytest.raises(Unsupported, match=f"^{name}: no gradient through pages, which sequences may share"):
        dispatch.backward(dispatch.load(name), *bound, Q, Q[..., 0], Q, None, frozenset("k"))


@pytest.mark.parametrize("name", ["streaming", "reference"])
def test_the_backward_of_a_cache_that_nobody_wrote_to_is_that_of_its_valid_part(name: str) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 2, n, 4)) for n in (3, 6, 6))
    k[:, :, 5:], v[:, :, 5:] = np.nan, np.nan
    backend = dispatch.load(name)
    bound = bind_decode(q, k, v, np.array([5]), None, Options(causal=True))
    out, lse = dispatch.forward(backend, *bound)
    got = dispatch.backward(backend, *bound, out, lse, q, None, frozenset("qkv"))
    valid = bind(q, k[:, :, :5], v[:, :, :5], Options(causal=True))
    right = dispatch.backward(backend, *valid, out, lse, q, None, frozenset("qkv"))
    assert right.dq.tolist() == got.dq.tolist()
    for a, b in ((right.dk, got.dk), (right.dv, got.dv)):
        assert a.tolist() == b[:, :, :5].tolist()
        assert not b[:, :, 5:].any()


def test_a_torch_backend_serves_numpy_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays go to the kind that the backend works on and come back as what they were."""
    torch = pytest.importorskip("torch")
    ml_dtypes = pytest.importorskip("ml_dtypes")
    seen = []

    class Fake:
        name, kind = "fake", "torch"
        why_not = staticmethod(lambda problem: None)

        @staticmethod
        def forward(problem: object, tensors: attnproof.problem.Tensors) -> tuple[object, object]:
            seen.append(tensors)
            return tensors.v.clone(), torch.zeros(tensors.q.shape[:-1])

    for dtype in (np.float16, ml_dtypes.bfloat16, np.float32):
        base = np.arange(48).reshape(1, 2, 6, 4).astype(dtype)
        unaligned = np.frombuffer(b"x" + base.tobytes(), np.uint8)[1:].view(dtype).reshape(base.shape)
        records = np.zeros(base.shape, [("a", dtype), ("b", np.int8)])
        records["a"] = base
        for x in (
            base,
            base[:, :, ::-1],
            base[..., ::2],
            unaligned,
            records["a"],
            np.broadcast_to(base[:, :, :1], base.shape),
        ):
            bound = bind(x, x, x, Options(mask=np.broadcast_to(np.bool_(True), (6, 6))))
            out, lse = dispatch.forward(Fake, *bound)
            assert (type(x), x.dtype, x.tolist()) == (type(out), out.dtype, out.tolist())
            assert np.float32 == lse.dtype
    assert all(isinstance(part, torch.Tensor) for part in seen[0] if part is not None)


def test_arrays_are_not_copied_on_their_way_to_a_torch_backend() -> None:
    torch = pytest.importorskip("torch")
    from attnproof.arrays import as_torch

    x = np.zeros((3, 4), np.float32)
    assert x.ctypes.data == as_torch(x).data_ptr()
    assert x.T.ctypes.data == as_torch(x.T).data_ptr()
    tensor = torch.zeros(2)
    assert tensor is as_torch(tensor)
    assert as_torch(None) is None


def test_a_tensor_with_a_lazy_negation_is_read_right() -> None:
    """The imaginary part of a conjugate carries a flag instead of a sign."""
    torch = pytest.importorskip("torch")
    z = torch.complex(
        torch.randn(1, 2, 3, 4, generator=torch.Generator().manual_seed(0)), torch.ones(1, 2, 3, 4)
    )
    x = z.conj().imag
    assert x.is_neg()
    q = z.real.contiguous()
    assert attention(q, q, x.clone().resolve_neg()).tolist() == attention(q, q, x).tolist()
