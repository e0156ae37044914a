"""Backend dot2 without a compiler: what it refuses, how it plans, packs, finds libraries and keeps code objects."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from attnproof import dispatch
from attnproof.backends import dot2
from attnproof.backends.dot2 import arguments, compiler, configs, gate, libraries, source
from attnproof.backends.dot2.variants import Variant, folds, pairwise
from attnproof.problem import Problem

PROBLEM = Problem("float16", "cuda", 1, 8, 2, 512, 512, 128, 128)
MAPS = """\
7f00-7f10 r-xp 00000000 08:01 1  /opt/env/lib/torch/lib/libamdhip64.so
7f10-7f20 r--p 00000000 08:01 1  /opt/env/lib/torch/lib/libamdhip64.so
7f20-7f30 r-xp 00000000 08:01 2  /opt/env/lib/torch/lib/libtorch_hip.so
7f30-7f40 r-xp 00000000 08:01 3  /usr/lib/libhiprtc.so.6.3.1
"""


def test_it_comes_right_after_triton() -> None:
    """Where Triton serves a GPU it is the better one; where it does not, this is."""
    assert dispatch.ORDER.index("triton") + 1 == dispatch.ORDER.index("dot2")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "float64"}, "would lose float64"),
        ({"D": 513}, "head dims up to 512"),
        ({"dtype": "float32", "Dv": 257}, "head dims up to 256 in float32"),
        ({"N": 2**29}, "positions up to 2^29"),
        ({"B": 2**20, "H": 2**10}, "workgroups in 31 bits"),
        ({"device": "cpu"}, "needs an AMD GPU"),
    ],
)
def test_what_it_cannot_do_is_refused_by_a_sentence(change: dict[str, object], words: str) -> None:
    reason = dot2.why_not(replace(PROBLEM, **change))
    assert reason is not None
    assert words in reason


def test_another_runner_takes_cpu_tensors_and_still_refuses_what_no_device_could_do() -> None:
    with dot2.running_on(lambda step: None):
        assert dot2.why_not(replace(PROBLEM, device="cpu")) is None
        assert dot2.why_not(replace(PROBLEM, device="cpu", dtype="float64")) is not None
    assert dot2.why_not(replace(PROBLEM, device="cpu")) is not None


def test_packed_bytes_come_back_field_by_field() -> None:
    given = {
        "q": 2**47 + 16,
        "k_n": -128,
        "M": 77,
        "scale": 0.125,
        "threshold": 2**32 - 1,
        "inverse_keep": 2.0,
    }
    found = arguments.unpack(arguments.pack(given))
    assert given == {name: found[name] for name in given}
    assert {0} == {value for name, value in found.items() if name not in given}


def test_a_field_that_the_struct_has_not_is_an_error() -> None:
    with pytest.raises(KeyError, match="strid_q: expected a field of struct Args"):
        arguments.pack({"strid_q": 1})


def test_fields_are_read_from_the_header() -> None:
    fields = arguments.parse("struct Args {\n  const void* q;\n  i64 a_b, a_h;\n  float scale;\n};\n")
    assert ["q", "a_b", "a_h", "scale"] == [name for name, _ in fields]


def test_every_text_is_whole_and_names_its_kernel() -> None:
    """A run-time compiler sees no file system: nothing may be left to include but the CUDA twin's header."""
    for kernel in source.FILES:
        text = source.text(kernel)
        assert [] == [line for line in text.splitlines() if line.startswith('#include "')]
        assert 1 == text.count("struct Args {")
        assert kernel in text


WIDTHS = (1, 16, 64, 80, 128, 192, 256, 512)


@pytest.mark.parametrize(
    ("dtype", "width"),
    [(dtype, width) for dtype in ("float16", "bfloat16") for width in WIDTHS]
    + [("float32", width) for width in WIDTHS if width <= configs.MAX_HEAD_DIM_SINGLE],
)
def test_every_pass_has_a_tile_that_fits(dtype: str, width: int) -> None:
    problem = replace(PROBLEM, dtype=dtype, D=width, Dv=width)
    for which in ("forward", "decode", "dq", "dkdv", "dbias"):
        config = configs.choose(problem, which, halves=dtype == "float16")
        assert configs.lds_bytes(problem, which, config) <= configs.LDS_LIMIT
        rows = config.threads // configs.LANES
        assert 0 == config.block_m % (rows if which != "dkdv" else configs.LANES)
        assert 0 == config.block_n % (configs.LANES if which != "dkdv" else rows)


def test_scores_stay_raw_only_under_a_positive_scale() -> None:
    """A negative scale turns the maximum of raw products into the minimum of the logits."""
    assert folds(PROBLEM)
    assert not folds(replace(PROBLEM, scale=-1.0))
    assert not folds(replace(PROBLEM, scale=0.0))
    assert not folds(replace(PROBLEM, softcap=1.0))


def test_options_that_are_off_name_no_flag() -> None:
    """Two calls that differ in nothing that is compiled share their kernel."""
    assert {} == pairwise(PROBLEM)
    assert {"BANDED": 1} == pairwise(replace(PROBLEM, right=0))
    assert {"BANDED": 1, "KEEP": 1} == pairwise(replace(PROBLEM, has_keep=True))


def test_the_runtime_that_torch_has_mapped_is_the_first_candidate() -> None:
    """Pointers and streams of another copy of the library mean nothing to it."""
    assert ["/opt/env/lib/torch/lib/libamdhip64.so"] == libraries.mapped("amdhip64", MAPS)
    first, *rest = libraries.candidates("amdhip64", MAPS)
    assert "/opt/env/lib/torch/lib/libamdhip64.so" == first
    assert ["libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5"] == rest[-3:]


def test_the_compiler_is_looked_for_beside_the_runtime_and_in_the_named_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, named = tmp_path / "torch", tmp_path / "rocm" / "lib"
    for folder in (beside, named):
        folder.mkdir(parents=True)
        (folder / "libhiprtc.so.6").touch()
    monkeypatch.setenv("ROCM_PATH", str(tmp_path / "rocm"))
    maps = f"7f00-7f10 r-xp 00000000 08:01 1  {beside}/libamdhip64.so.6\n"
    found = list(libraries.candidates("hiprtc", maps))
    assert [str(beside / "libhiprtc.so.6"), str(named / "libhiprtc.so.6")] == found[:2]


def test_a_kept_code_object_is_found_again_and_a_broken_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that was cut short must not be handed to a driver."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    variant = Variant("attn_forward", ("-DHEAD_D=64",))
    keys = {
        compiler.cache_key(variant, "gfx906", "hiprtc 9.0"),
        compiler.cache_key(variant, "gfx906:xnack-", "hiprtc 9.0"),
        compiler.cache_key(variant, "gfx906", "hiprtc 7.0"),
        compiler.cache_key(replace(variant, flags=("-DHEAD_D=80",)), "gfx906", "hiprtc 9.0"),
    }
    assert 4 == len(keys)
    key = keys.pop()
    assert compiler.read_cache(key) is None
    compiler.write_cache(key, compiler.ELF + b"rest")
    assert compiler.ELF + b"rest" == compiler.read_cache(key)
    compiler.write_cache(key, b"half a file")
    assert compiler.read_cache(key) is None


def self_tested(errors: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> tuple[str | None, int]:
    """The gate's verdict, asked for twice, and how often the self-test ran for it."""
    ran = []

    def run(index: int) -> dict[str, float]:
        ran.append(index)
        return errors

    monkeypatch.setattr(gate, "self_test", run)
    runtime = SimpleNamespace(compiler=SimpleNamespace(version="hiprtc 9.0"), driver=60300000)
    device = SimpleNamespace(architecture="gfx906", runtime=runtime)
    verdicts = {gate._remembered(device, 0) for _ in range(2)}
    assert 1 == len(verdicts)
    return verdicts.pop(), len(ran)


def test_a_self_test_that_held_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert (None, 1) == self_tested({"out": 1e-3, "lse": 1e-6}, monkeypatch)


@pytest.mark.parametrize("error", [0.5, float("nan"), float("inf")])
def test_a_self_test_that_failed_closes_the_gate_and_is_tried_again(
    error: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN is larger than nothing: a comparison alone would let it through."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    reason, ran = self_tested({"out": error, "lse": 1e-6}, monkeypatch)
    assert reason is not None
    assert reason.startswith("failed its self-test on gfx906")
    assert 2 == ran
