"""Plain C++ arithmetic compiled for gfx906 and interpreted, against NumPy: whole sequences of instructions, to the bit."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnproof import gcn
from attnproof.gcn.codeobject import find_objdump
from attnproof.philox import philox4x32

CLANG = shutil.which("clang-19")
N = 256
pytestmark = pytest.mark.skipif(
    CLANG is None or find_objdump() is None, reason="no clang 19 and llvm-objdump here"
)


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> gcn.CodeObject:
    target = tmp_path_factory.mktemp("gcn") / "arithmetic.co"
    flags = "-x hip --offload-arch=gfx906 --cuda-device-only --no-gpu-bundle-output -nogpulib -nogpuinc -O3 -std=c++17"
    source = Path(__file__).parent / "arithmetic.hip"
    subprocess.run([str(CLANG), *flags.split(), "-o", str(target), str(source)], check=True)
    return gcn.CodeObject.load(target.read_bytes())


def run(code: gcn.CodeObject, kernel: str, arrays: list[Any], *numbers: int) -> Any:
    memory = gcn.Memory()
    pointers = [memory.place(array, name=f"argument {k}") for k, array in enumerate(arrays)]
    kernarg = struct.pack(f"<{len(pointers)}Q{len(numbers)}I", *pointers, *numbers)
    gcn.launch(code, kernel, grid=(1, 1, 1), block=(N, 1, 1), kernarg=kernarg, memory=memory, counts=False)
    return arrays[-1]


def toward_zero(a: Any, b: Any) -> Any:
    return np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))


def test_integer_division_and_64_bit_products(code: gcn.CodeObject) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.integers(-(2**31), 2**31, (2, N))
    a[:8], b[:8] = [0, 1, -1, 2**31 - 1, -(2**31), 7, 2**31 - 1, 5], [1, -1, 2**31 - 1, 2, 3, 13, -(2**31), 5]
    b[b == 0] = 1
    out = run(
        code, "integers", [a.astype(np.int32), b.astype(np.int32), np.zeros(9 * N, np.int64)], N
    ).reshape(9, N)
    u, v = a.astype(np.uint32), b.astype(np.uint32)
    u64, v64 = u.astype(np.uint64), v.astype(np.uint64)
    assert np.array_equal(toward_zero(a, b), out[0])
    assert np.array_equal(a - toward_zero(a, np.int64(13)) * 13, out[1])
    assert np.array_equal((u // v).astype(np.int64), out[2])
    assert np.array_equal(a * b, out[3])
    assert np.array_equal((u64 * v64 >> np.uint64(32)).astype(np.int64), out[4])
    assert np.array_equal(toward_zero(a << 20, b), out[5])
    assert np.array_equal(((u << 7 | u >> 25) + v.byteswap()).astype(np.int64), out[6])
    bits = [
        (
            int(x).bit_count() * 3,
            32 - (int(y) | 1).bit_length(),
            ((int(x) | 2) & -(int(x) | 2)).bit_length() - 1,
        )
        for x, y in zip(u, v, strict=True)
    ]
    extra = np.array([p + lead - trail for p, lead, trail in bits])
    assert np.array_equal((np.where(u > v, u - v, 0).astype(np.int64) + extra) & 0xFFFFFFFF, out[7])
    assert np.array_equal((a * b) >> (b & 63), out[8])


def test_fp32_division_and_square_root_are_correctly_rounded(code: gcn.CodeObject) -> None:
    rng = np.random.default_rng(1)
    a, b = (rng.standard_normal((2, N)) * 2.0 ** rng.integers(-60, 60, (2, N))).astype(np.float32)
    a[:10] = [np.inf, -np.inf, 0, -0.0, np.nan, 1e-42, 3e38, 1e-45, 1, 3e38]
    b[:10] = [2, 0, 0, 5, 1, 3, 1e-40, 1e38, np.inf, 1e-45]
    out = run(code, "floats", [a, b, np.zeros(5 * N, np.float32)], N).reshape(5, N)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(out[0], a / b)
        np.testing.assert_array_equal(out[1], np.sqrt(a))
        wide = b.astype(np.float64)
        np.testing.assert_array_equal(
            out[2], np.copysign(np.floor(np.abs(wide) + 0.5), wide).astype(np.float32)
        )
        scaled = b * np.float32(1e10)
        fits = np.abs(scaled) < 2.0**62
        np.testing.assert_array_equal(
            out[4][fits], np.trunc(scaled[fits]).astype(np.int64).astype(np.float32)
        )
        low, high = np.fmin(a, b).astype(np.float64), np.fmax(a, b).astype(np.float64)
        np.testing.assert_array_equal(out[3], (low + high * 0.5).astype(np.float32))


def test_fp16_division_and_square_root_are_correctly_rounded(code: gcn.CodeObject) -> None:
    a, b = np.random.default_rng(2).standard_normal((2, N)).astype(np.float16) * np.float16(8)
    a[:6], b[:6] = [0, np.inf, 65504, 6e-8, -1, np.nan], [0, 2, 1e-4, 3, 0, 1]
    out = run(code, "halves", [a, b, np.zeros(4 * N, np.float16)], N).reshape(4, N)
    x, y = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(out[0], (x / y).astype(np.float16))
        np.testing.assert_array_equal(out[1], np.sqrt(x).astype(np.float16))
        np.testing.assert_array_equal(out[2], (x * y + x).astype(np.float16))
        # clang contracts x * y - y
        np.testing.assert_array_equal(out[3], (x * y - y).astype(np.float16))


def test_philox_is_the_packages_philox(code: gcn.CodeObject) -> None:
    out = run(code, "philox", [np.zeros(4 * N, np.uint32)], 123, 456).reshape(N, 4)
    zero, three, four = (np.full(N, word, np.uint64) for word in (0, 3, 4))
    counter = (np.arange(N, dtype=np.uint64), zero, three, four)
    assert np.array_equal(np.stack(philox4x32(counter, (123, 456)), axis=-1), out)


def test_lanes_that_leave_a_loop_one_by_one_keep_their_results(code: gcn.CodeObject) -> None:
    given = np.random.default_rng(3).integers(1, 1000, N).astype(np.int32)
    out = run(code, "collatz", [given, np.zeros(N, np.int32)], 60)
    for start, steps in zip(given.tolist(), out.tolist(), strict=True):
        count = 0
        while start != 1 and count < 60:
            start = 3 * start + 1 if start & 1 else start // 2
            count += 1
        assert count == steps
