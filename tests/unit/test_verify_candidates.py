"""Anyone's kernel becomes a candidate: by file, by module, as a C function; and what it cannot do is said, not passed."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnproof.cases import Case, find
from attnproof.verify import cabi, loaders, steps, suite, tiers
from attnproof.verify.adapters import external
from attnproof.verify.candidate import Candidate, Outputs, Skip, Traits, keywords, refusal, split_result

SOFTMAX = """
import numpy as np

def attention(q, k, v, *, causal, scale, mask=None):
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x.astype(np.float64), group, axis=1) for x in (k, v))
    s = scale * q.astype(np.float64) @ k.swapaxes(-1, -2)
    M, N = s.shape[-2:]
    seen = np.tri(M, N, N - M, dtype=bool) if causal else np.ones((M, N), bool)
    s = np.where(seen if mask is None else seen & mask, s, -np.inf)
    top = s.max(-1, keepdims=True, initial=-np.inf)
    p = np.exp(s - np.where(np.isinf(top), 0, top))
    total = p.sum(-1, keepdims=True)
    out = (p @ v) / np.where(total == 0, 1, total)
    with np.errstate(divide="ignore"):
        lse = top[..., 0] + np.log(total[..., 0])
    return out.astype(q.dtype), lse.astype(np.float32)

attention.attnproof = {"arrays": "numpy", "numerics": "precise", "dtypes": ["float16", "float32"]}
"""


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], str]:
    """Write a Python file and return the word that loads its `attention`."""

    def write(text: str) -> str:
        path = tmp_path / "mine.py"
        path.write_text(text)
        return f"{path}:attention"

    return write


def verdicts(candidate: Candidate, *identifiers: str) -> list[suite.Verdict]:
    return suite.run(candidate, [find(identifier) for identifier in identifiers])


def test_a_numpy_function_in_a_file_is_judged_and_skips_what_it_does_not_name(
    written: Callable[[str], str],
) -> None:
    candidate = loaders.load(written(SOFTMAX))
    found = verdicts(
        candidate,
        "mask-dead-rows/float16",
        "gqa-8-2/float32",
        "window-causal-40/float16",
        "normal-128/bfloat16",
    )
    assert [verdict.status for verdict in found] == ["PASS", "PASS", "SKIP", "SKIP"]
    assert [verdict.reason for verdict in found[2:]] == ["does not take window", "takes float16, float32"]
    assert found[0].notes == ("no backward: NumPy function without one",)


def test_a_top_left_causal_mask_is_named_by_the_hint_and_accepted_when_declared(
    written: Callable[[str], str],
) -> None:
    """The commonest difference between libraries: silently wrong for cached decoding."""
    text = SOFTMAX.replace("np.tri(M, N, N - M, dtype=bool)", "np.tri(M, N, dtype=bool)")
    case = "bottom-right-100x160/float16"
    (verdict,) = verdicts(loaders.load(written(text)), case)
    assert verdict.status == "FAIL"
    assert "it is the right answer with causal aligned top left" in verdict.hint
    declared = text.replace('"arrays": "numpy"', '"arrays": "numpy", "align": "top_left"')
    found = verdicts(loaders.load(written(declared)), case, "top-left-100x160/float16")
    assert [verdict.status for verdict in found] == ["SKIP", "PASS"]
    assert found[0].reason == "its causal mask is aligned top left"


def test_an_exception_is_a_failure_and_a_refusal_is_a_skip(written: Callable[[str], str]) -> None:
    raising = SOFTMAX.replace("    group =", "    raise IndexError('page 7')\n    group =")
    refusing = SOFTMAX.replace(
        "    group =", "    raise NotImplementedError('no such head dim')\n    group ="
    )
    (broken,) = verdicts(loaders.load(written(raising)), "normal-128/float32")
    (refused,) = verdicts(loaders.load(written(refusing)), "normal-128/float32")
    assert (broken.status, broken.reason) == ("FAIL", "raised IndexError: page 7")
    assert (refused.status, refused.reason) == ("SKIP", "no such head dim")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("missing.py:attention", "expected a Python file, missing.py does not exist"),
        ("no_such_module:attention", "cannot import 'no_such_module'"),
        ("math:nothing", "has no attribute 'nothing'"),
        ("math:pi", "expected a function at 'math:pi', got float"),
        ("torch:fast", "expected torch:eager or torch:flex"),
        ("lib.so:attention", "expected an argument map at lib.toml"),
        ("nobody", "expected FILE.py:FUNCTION"),
        ("flash_attn:9", "expected one of flash_attn"),
    ],
)
def test_a_word_that_names_nothing_says_what_was_expected(word: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace(".", r"\.")):
        loaders.load(word)


def test_unknown_declarations_are_refused(written: Callable[[str], str]) -> None:
    """A misspelt key would otherwise declare nothing."""
    with pytest.raises(ValueError, match="expected keys among .*, got numeric"):
        loaders.load(written(SOFTMAX.replace('"numerics"', '"numeric"')))


def test_a_torch_function_gets_its_gradients_from_autograd(written: Callable[[str], str]) -> None:
    pytest.importorskip("torch")
    candidate = loaders.load(
        written(
            "import torch.nn.functional as F\n"
            "def attention(q, k, v, *, causal, scale, mask=None):\n"
            "    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)\n"
            "attention.attnproof = {'align': 'top_left', 'gqa': False}\n"
        ),
        "cpu",
    )
    found = verdicts(candidate, "normal-128-causal/float32", "gqa-8-2/float32")
    assert [verdict.status for verdict in found] == ["PASS", "SKIP"]
    assert [report.tensor for report in found[0].tensors] == ["out", "dq", "dk", "dv"]


def test_a_function_in_the_bmhd_layout_says_so_and_sees_only_other_strides(
    written: Callable[[str], str],
) -> None:
    pytest.importorskip("torch")
    candidate = loaders.load(
        written(
            "import torch.nn.functional as F\n"
            "def attention(q, k, v, *, causal, scale):\n"
            "    q, k, v = (x.transpose(1, 2) for x in (q, k, v))\n"
            "    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale).transpose(1, 2)\n"
            "attention.attnproof = {'align': 'top_left', 'layout': 'bmhd'}\n"
        ),
        "cpu",
    )
    (verdict,) = verdicts(candidate, "normal-batch/float32")
    assert verdict.status == "PASS", verdict.reason


def test_a_backward_of_its_own_is_used_for_numpy_functions(written: Callable[[str], str]) -> None:
    own = (
        SOFTMAX
        + """
def backward(q, k, v, out, lse, dout, *, causal, scale):
    s = scale * q @ k.swapaxes(-1, -2)
    p = np.exp(s - lse[..., None])
    ds = p * (dout @ v.swapaxes(-1, -2) - (dout * out).sum(-1, keepdims=True))
    return scale * ds @ k, scale * ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ dout
attention.backward = backward
"""
    )
    (verdict,) = verdicts(loaders.load(written(own)), "normal-128/float32")
    assert verdict.status == "PASS", verdict.reason
    assert {report.tensor for report in verdict.tensors} == {"out", "lse", "dq", "dk", "dv"}


def test_results_of_other_forms_are_errors_of_the_candidate() -> None:
    array = np.zeros(3)
    assert split_result((array, array))[1] is array
    with pytest.raises(TypeError, match="got a tuple of 3"):
        split_result((array, array, array))
    with pytest.raises(TypeError, match="expected an array as out, got list"):
        split_result([1.0])


def test_refusals_name_what_is_missing() -> None:
    case = replace(find("everything/bfloat16"), Hkv=4, Dv=64)
    assert refusal(case, Traits(), frozenset({"causal", "scale", "mask"})) == (
        "does not take window, bias, alibi_slopes, softcap, sink"
    )
    assert refusal(find("packed/float16"), Traits(), None) == "no packed rows"
    assert (
        refusal(find("gqa-8-2/float32"), Traits(gqa=False), None) == "needs as many key heads as query heads"
    )
    assert refusal(find("normal-128/float32"), Traits(limits=lambda case: "not today"), None) == "not today"
    assert keywords(lambda q, **rest: q) is None


def test_a_kernel_for_one_dtype_gets_the_cases_in_that_dtype() -> None:
    """A tier of bfloat16 cases must not shrink to nothing for a float16 kernel."""
    half = Candidate("half", lambda inputs: Outputs({}), Traits(dtypes=("float16",)))
    assert steps.served(find("normal-128/bfloat16"), half).id == "normal-128/float16"


def test_external_kernels_that_are_not_installed_are_skipped_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external, "find_spec", lambda name: None)
    for word in external.ADAPTERS:
        library, _, version = word.partition(":")
        with pytest.raises(Skip, match="is not installed"):
            external.build(library, version)


def test_external_adapters_pass_what_the_library_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their limits are data; the call itself is checked with stand-ins that record it."""
    import sys
    from types import ModuleType

    seen: dict[str, Any] = {}

    def record(*args: Any, **options: Any) -> Any:
        seen.update(options)
        return args[0], args[0], None

    for name, attribute in (("flash_attn", "flash_attn_func"), ("flash_attn_interface", "flash_attn_func")):
        module = ModuleType(name)
        setattr(module, attribute, record)
        monkeypatch.setitem(sys.modules, name, module)
    q = np.zeros((1, 4, 2, 8))
    external._flash2(q, q, q, causal=True, scale=0.5, window=(3, 0), softcap=2.0)
    assert (seen["softmax_scale"], seen["window_size"], seen["softcap"]) == (0.5, (3, 0), 2.0)
    external._flash3(q, q, q, causal=False, scale=0.25)
    assert (seen["softmax_scale"], seen["window_size"]) == (0.25, (-1, -1))
    limits = external.ADAPTERS["flash_attn"][2].limits
    assert limits is not None
    assert limits(find("head-dim-5/float16")) == "head dims are multiples of 8 up to 256"
    assert limits(find("normal-128/float16")) is None


C_SOURCE = r"""
#include <math.h>
#include <stdint.h>
int attention(const float *q, const float *k, const float *v, float *out, float *lse, int B, int H, int Hkv, int M, int N,
              int D, int Dv, float scale, int causal) {
  for (int bh = 0; bh < B * H; ++bh) for (int i = 0; i < M; ++i) {
    int kv = bh / H * Hkv + bh % H / (H / Hkv), last = causal ? i + N - M : N - 1;
    float m = -INFINITY; double l = 0, acc[512] = {0};
    for (int j = 0; j < N && j <= last; ++j) {
      double s = 0; for (int d = 0; d < D; ++d) s += (double)q[((long)bh * M + i) * D + d] * k[((long)kv * N + j) * D + d];
      float t = (float)(s * scale), m_new = fmaxf(m, t); double alpha = exp(m - m_new), p = exp(t - m_new);
      l = l * alpha + p; for (int c = 0; c < Dv; ++c) acc[c] = acc[c] * alpha + p * v[((long)kv * N + j) * Dv + c];
      m = m_new;
    }
    for (int c = 0; c < Dv; ++c) out[((long)bh * M + i) * Dv + c] = l > 0 ? (float)(acc[c] / l) : 0;
    lse[(long)bh * M + i] = l > 0 ? (float)(m + log(l)) : -INFINITY;
  }
  BROKEN
  return 0;
}
"""
C_MAP = """
[attention]
arguments = ["q", "k", "v", "out", "lse", "B", "H", "Hkv", "M", "N", "D", "Dv", "scale", "causal"]
dtypes = ["float32"]
returns = "int"
numerics = "precise"
"""


@pytest.fixture
def library(tmp_path: Path) -> Callable[[str], str]:
    """Compile the C function, with one more statement, and return the word that loads it."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")

    def make(statement: str = "") -> str:
        source, target = tmp_path / "mine.c", tmp_path / f"mine{len(list(tmp_path.glob('*.so')))}.so"
        source.write_text(C_SOURCE.replace("BROKEN", statement))
        subprocess.run(
            [compiler, "-O1", "-shared", "-fPIC", "-o", str(target), str(source), "-lm"], check=True
        )
        target.with_suffix(".toml").write_text(C_MAP)
        return f"{target}:attention"

    return make


def test_a_c_function_is_judged_without_any_python(library: Callable[[str], str]) -> None:
    candidate = loaders.load(library())
    found = verdicts(
        candidate,
        "longer-queries-causal/float32",
        "uneven-32-80/float32",
        "gqa-8-2/float32",
        "sink/float32",
        "layout-bmhd/float32",
    )
    assert [verdict.status for verdict in found] == ["PASS", "PASS", "PASS", "SKIP", "PASS"], [
        v.reason for v in found
    ]
    assert {report.tensor for report in found[0].tensors} == {"out", "lse"}


def test_a_c_function_that_writes_past_its_output_is_caught(library: Callable[[str], str]) -> None:
    """G6: outputs lie between bands, and a store that misses its bound lands in one."""
    (verdict,) = verdicts(loaders.load(library("out[(long)B * H * M * Dv] = 0;")), "normal-128/float32")
    assert (verdict.status, verdict.reason) == ("FAIL", "raised WroteOutside: wrote outside of out")


def test_a_c_function_reports_its_own_errors(library: Callable[[str], str]) -> None:
    (verdict,) = verdicts(loaders.load(library("return 3;")), "normal-128/float32")
    assert (verdict.status, verdict.reason) == ("FAIL", "raised RuntimeError: returned 3")


def test_argument_maps_are_checked_word_by_word(tmp_path: Path, library: Callable[[str], str]) -> None:
    assert cabi.parse("N:int64") == cabi.Argument("N", "int64")
    assert cabi.parse("q.stride2").ctype == "int64"
    with pytest.raises(ValueError, match="got 'rows'"):
        cabi.parse("rows")
    with pytest.raises(ValueError, match="expected a type among"):
        cabi.parse("N:short")
    word = library()
    path = Path(word.rpartition(":")[0])
    with pytest.raises(ValueError, match=r"has no table \[other\]"):
        loaders.load(f"{path}:other")
    path.with_suffix(".toml").write_text(C_MAP.replace("numerics", "numeric"))
    with pytest.raises(ValueError, match="got numeric"):
        loaders.load(word)
    path.with_suffix(".toml").write_text('[attention]\narguments = ["q", "k"]\n')
    with pytest.raises(ValueError, match="expected q, k, v and out"):
        loaders.load(word)
    path.with_suffix(".toml").write_text(C_MAP.replace("[attention]", "[nothing]"))
    with pytest.raises(ValueError, match="has no symbol 'nothing'"):
        loaders.load(f"{path}:nothing")


def test_strides_reach_a_c_function_that_asks_for_them(tmp_path: Path) -> None:
    """With any stride in its map the arrays come as they lie, without a copy."""
    function = cabi._Function(None, [cabi.parse("q.stride0"), cabi.parse("q.stride3")], Traits(), "cpu")
    array = np.zeros((2, 3, 4, 5), np.float32).swapaxes(1, 2)
    assert function._host(array) is array
    values = [
        function._value(name, find("normal-128/float32"), {}, {"q": array})
        for name in ("q.stride0", "q.stride1", "q.stride2")
    ]
    assert values == [60, 5, 20]


def test_ours_are_candidates_and_answer_for_every_named_case() -> None:
    """A backend of this package either serves a case or has a sentence; the tiers never see an exception."""
    from attnproof.verify.adapters import ours

    for name in ours.names():
        candidate = ours.build(name, "cpu") if name in ("streaming", "reference") else ours.build(name)
        reasons = [candidate.refuse(case) for case in tiers.cases("full")]
        assert all(reason is None or reason for reason in reasons)
    with pytest.raises(Skip, match="no backend of that name"):
        ours.build("nothing")


def test_decode_and_packed_cases_run_through_the_public_functions() -> None:
    from attnproof.verify.adapters import ours

    found = verdicts(
        ours.build("streaming", "cpu"), "packed/float32", "decode-append/float32", "paged-append/float32"
    )
    assert [verdict.status for verdict in found] == ["PASS"] * 3, [verdict.reason for verdict in found]


def test_without_torch_ours_are_judged_on_numpy_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnproof.verify.adapters import ours

    monkeypatch.setattr(ours, "_torch_here", lambda: False)
    found = verdicts(ours.build("streaming"), "everything/float32", "layout-bmhd/float32", "packed/float32")
    assert [verdict.status for verdict in found] == ["PASS"] * 3, [verdict.reason for verdict in found]
    assert "dsink" in {report.tensor for report in found[0].tensors}


def test_a_case_may_be_asked_for_in_other_dtypes_and_lengths() -> None:
    assert find("normal-1024-d128/float32").dtype == "float32"
    jittered: Case = find("normal-128~131x127/float16")
    assert (jittered.M, jittered.N, jittered.id) == (131, 127, "normal-128~131x127/float16")
    with pytest.raises(KeyError, match="nearest: .*normal-128/float16"):
        find("normal-129/float16")


@pytest.mark.parametrize(
    "name",
    ["alibi", "softcap", "mask-dead-rows", "bias", "gqa-8-2", "longer-queries-causal", "window-dead-rows"],
)
def test_flex_attention_is_asked_for_what_it_means(name: str) -> None:
    """Each option reaches it as a score or mask function; one that was written wrong would look like its fault."""
    pytest.importorskip("torch")
    from attnproof.verify.adapters import flex

    (verdict,) = suite.run(flex.build("cpu"), [find(f"{name}/float32")])
    assert ("PASS", "") == (verdict.status, verdict.reason)
