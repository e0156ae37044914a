"""The owner's command, as far as it goes without the hardware: its calls are right, and its kernels do what they count."""

from __future__ import annotations

import pytest
import torch

from attnproof.backends import dot2
from attnproof.backends.dot2 import doctor, gate

from .interpreter import Interpreter

SMALL = (
    doctor.Named("causal", (2, 1), 20, 30, 64, causal=True),
    doctor.Named("decode", (4, 2), 1, 100, 64),
    doctor.Named("bfloat16", (1, 1), 20, 20, 32, "bfloat16"),
    doctor.Named("not aligned", (1, 1), 10, 20, 59),
)


def test_named_calls_are_verified_against_fp32() -> None:
    with dot2.running_on(Interpreter()):
        found = doctor.verify("cpu", SMALL)
    assert [True] * len(SMALL) == [case["ok"] for case in found], found


def test_a_wrong_kernel_is_not_called_right() -> None:
    with dot2.running_on(Interpreter(edit=lambda kernel, text: text.replace("0x05040100", "0x01000504"))):
        (found,) = doctor.verify("cpu", SMALL[:1])
    assert not found["ok"]


def test_the_self_test_holds_and_would_find_a_wrong_mask() -> None:
    """It gates the first use on a user's machine."""
    with dot2.running_on(Interpreter()):
        errors = gate.self_test("cpu")
    assert {"out", "lse", "dq", "dk", "dv"} == set(errors)
    assert max(errors.values()) <= gate.ALLOWED
    with dot2.running_on(
        Interpreter(edit=lambda kernel, text: text.replace("distance <= right", "distance <= right + 1"))
    ):
        wrong = gate.self_test("cpu")
    assert wrong["out"] > gate.ALLOWED


@pytest.mark.parametrize("bench", doctor.BENCHES, ids=lambda bench: bench.name)
def test_a_bench_kernel_executes_what_it_counts(bench: doctor.Bench) -> None:
    """A loop that the compiler had emptied would report a wonderful rate."""
    mnemonic, of_one = {
        "flop": ("v_dot2_f32_f16", 4), "exp": ("v_exp_f32", 1), "byte": ("ds_read_b128", 16),
    }[bench.unit]  # fmt: skip
    made = []
    for rounds in (4, 6):
        run = Interpreter(counting=True)
        run(doctor.bench_step(bench, 1, rounds, torch.empty(256)))
        counts = run.counts[0][1]
        made.append(sum(n for name, n in counts.mnemonics.items() if name.startswith(mnemonic)))
    waves = 4
    assert bench.per_round * 2 * waves == (made[1] - made[0]) * of_one


def test_the_second_lds_pattern_tells_the_two_readings_of_a_phase_apart() -> None:
    """Free of conflicts under the lane groups that the interpreter takes from composable_kernel."""
    for bench in doctor.BENCHES[2:]:
        run = Interpreter(counting=True)
        run(doctor.bench_step(bench, 1, 4, torch.empty(256)))
        counts = run.counts[0][1]
        assert counts.lds_read_cycles == counts.lds_read_cycles_free
    lane = torch.arange(32)
    bank = ((lane >> 2) * 32 + (lane >> 4) * 16 + (lane & 3) * 4) % 32
    assert all(len(set(bank[first : first + 8].tolist())) == 4 for first in range(0, 32, 8))


def test_without_such_a_gpu_the_command_says_why() -> None:
    document = doctor.examine()
    if torch.version.hip:
        pytest.skip("this machine has ROCm")
    assert not document["holds"]
    assert ("dot2", "serves AMD GPUs, and this torch is not built for ROCm") in doctor.as_rows(document)
