"""The sweep: no time without a green verdict, shapes and their arithmetic, the journal, roofs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from attnproof.measure import bench, implementations, roofs, shapes, sweep, warm  # noqa: E402
from attnproof.measure.implementations import Implementation, Unable  # noqa: E402
from attnproof.measure.journal import Journal  # noqa: E402
from attnproof.measure.protocol import Protocol  # noqa: E402
from attnproof.measure.shapes import Shape, parse  # noqa: E402
from attnproof.measure.timer import Call, HostTimer  # noqa: E402
from attnproof.measure.verdict import Judge  # noqa: E402

QUICK = Protocol(warmup=1, timed=10, cold=False, slots=2)
SHAPE = Shape(2, 4, 48, 16, Hkv=2, dtype="float32", causal=True)
RIGHT = implementations.load("eager")


class Ticking:
    """Every call takes one millisecond more than the one before; the clock is never read."""

    name, flushed = "ticking", 0.0

    def __init__(self) -> None:
        self.calls = 0

    def run(self, calls: Sequence[Call], *, cold: bool) -> tuple[list[float], list[Any]]:
        seconds, results = [], []
        for call in calls:
            results.append(call())
            self.calls += 1
            seconds.append(1e-3 * self.calls)
        return seconds, results


def broken(name: str, change: Any, **more: Any) -> Implementation:
    def run(q: Any, k: Any, v: Any, shape: Shape) -> Any:
        return change(RIGHT.run(q, k, v, shape))

    return Implementation(name, "flash", run, **more)


def rows_of(*chosen: Implementation, shape: Shape = SHAPE) -> dict[str, sweep.Row]:
    return {row.name: row for row in sweep.measure_shape(shape, chosen, "cpu", Ticking(), QUICK)}


def test_a_wrong_candidate_has_a_reason_and_no_time() -> None:
    rows = rows_of(RIGHT, broken("off", lambda out: out * 1.01))
    assert ("PASS", 10) == (rows["eager"].status, len(rows["eager"].samples))
    assert ("FAIL", (), None) == (rows["off"].status, rows["off"].samples, rows["off"].ratio)
    assert "hard bound" in rows["off"].reason


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda out: out[:, :, :-1], "expected shape"),
        (lambda out: out.masked_fill(out > 1, float("nan")), "not finite"),
        (lambda out: out.roll(1, dims=1), "hard bound"),
    ],
)
def test_what_is_wrong_is_named(change: Any, words: str) -> None:
    row = rows_of(broken("bad", change))["bad"]
    assert "FAIL" == row.status
    assert words in row.reason


def test_a_mistake_in_a_gradient_alone_costs_the_time() -> None:
    """A fast wrong backward is the classic benchmark lie."""

    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, out: Any) -> Any:
            return out.clone()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad * 0.999

    for run in ("backward", "both"):
        row = rows_of(broken("half", Half.apply), shape=replace(SHAPE, run=run))["half"]
        assert ("FAIL", ()) == (row.status, row.samples)
        assert "dq" in row.reason or "dv" in row.reason


def test_a_refusal_is_a_skip_and_an_exception_a_failure() -> None:
    def refuse(*_: Any) -> Any:
        raise Unable("too small")

    def crash(*_: Any) -> Any:
        raise ZeroDivisionError("oh")

    rows = rows_of(Implementation("no", "flash", refuse), Implementation("crash", "flash", crash))
    assert ("SKIP", "too small") == (rows["no"].status, rows["no"].reason)
    assert ("FAIL", "raised ZeroDivisionError: oh") == (rows["crash"].status, rows["crash"].reason)


def test_a_candidate_that_turns_wrong_once_the_clock_runs_loses_its_times() -> None:
    """The judged call and the timed call are not the same call."""
    calls = 0

    def later(out: Any) -> Any:
        nonlocal calls
        calls += 1
        return out if calls <= 4 else torch.zeros_like(out)

    row = rows_of(broken("later", later))["later"]
    assert ("FAIL", ()) == (row.status, row.samples)
    assert row.reason.startswith("a timed result differs")


def test_a_timed_result_with_other_bits_is_judged_again_and_may_be_right() -> None:
    """Atomic additions give other bits each time, and are not wrong for it."""
    calls = 0

    def wobble(out: Any) -> Any:
        nonlocal calls
        calls += 1
        return out * (1 + 2e-7 * (calls % 2))

    assert "PASS" == rows_of(broken("wobble", wobble))["wobble"].status


def test_a_bfloat16_result_is_judged_by_its_own_roundings() -> None:
    shape = replace(SHAPE, dtype="bfloat16", run="both")
    rows = rows_of(RIGHT, implementations.load("sdpa:flash"), shape=shape)
    assert {"PASS"} == {row.status for row in rows.values()}
    wrong = rows_of(broken("bits", lambda out: out * 1.05), shape=replace(shape, run="forward"))["bits"]
    assert "FAIL" == wrong.status


def test_each_set_of_inputs_judges_a_part_of_its_own() -> None:
    parts = {Judge(SHAPE, bench.make_inputs(SHAPE, "cpu", slot), slot).part for slot in range(6)}
    assert len(parts) > 1


def test_a_long_forward_is_judged_on_sampled_rows_with_the_last_among_them() -> None:
    shape = Shape(1, 1, 700, 8, dtype="float32", causal=True)
    inputs = bench.make_inputs(shape, "cpu", 0)
    out = RIGHT.run(*inputs[:3], shape)
    judge = Judge(shape, inputs)
    assert judge("eager", "flash", {"out": out}).green
    out[0, 0, -1] *= 1.01
    assert not judge("eager", "flash", {"out": out}).green
    assert "sampled rows" in judge.part


def test_of_results_with_other_bits_the_farthest_is_judged_once_the_clock_has_stopped() -> None:
    """A judge between two samples would take longer than they do; a lenient pick would let a wrong one through."""
    made = bench.Bench(SHAPE, "cpu", 1)
    made.verdict(RIGHT)
    judged = made.judged["eager", 0][0]
    for factor in (1.0, 1 + 3e-7, 1.5, 1 + 5e-7):
        made.look("eager", 0, judged * factor)
    assert 0.5 == pytest.approx(made.others["eager"].distance, rel=0.1)
    assert made.recheck(RIGHT).startswith("a timed result differs")
    made.others.clear()
    made.look("eager", 0, judged.clone())
    assert "" == made.recheck(RIGHT)


def test_a_nan_among_timed_results_is_the_farthest() -> None:
    made = bench.Bench(SHAPE, "cpu", 1)
    made.verdict(RIGHT)
    judged = made.judged["eager", 0][0]
    made.look("eager", 0, judged.masked_fill(judged == judged.max(), float("nan")))
    made.look("eager", 0, judged * 2)
    assert math.inf == made.others["eager"].distance
    assert "not finite" in made.recheck(RIGHT)


def test_where_the_time_of_a_sweep_went_is_told() -> None:
    """The bar of host work between samples is about this number: flushes and samples are the device's."""
    cost = sweep.Cost()
    sweep.measure_shape(SHAPE, [RIGHT], "cpu", HostTimer(), replace(QUICK, cold=True), cost)
    assert {"inputs and oracle", "verdicts", "samples"} == set(cost.seconds)
    assert 0 < cost.spent.busy <= cost.spent.wall <= cost.seconds["samples"]
    assert cost.spent.wall / cost.spent.busy - 1 == pytest.approx(cost.spent.between)


@pytest.mark.parametrize("jobs", [0, 2])
def test_what_compiles_is_called_once_in_workers_before_the_clock(jobs: int) -> None:
    """On a CPU nothing of it serves, so the workers only have to come back; a refusal is no failure."""
    done: list[str] = []
    shapes = [replace(SHAPE, N=n, dtype="float32") for n in (16, 24)]
    assert [] == warm.warm(shapes, ("flex", "eager"), "cpu", jobs, done.append)
    assert [f"compiled {shape.name}" for shape in shapes if jobs] == sorted(done)


def test_a_call_that_fails_in_a_worker_is_told_and_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    crash = broken("crash", lambda out: 1 // 0)
    monkeypatch.setattr(implementations, "load", lambda name: crash)
    assert [f"{SHAPE.name}, crash: ZeroDivisionError"] == warm.once(SHAPE, ("crash",), "cpu")


def test_workers_begin_with_kernels_that_differ() -> None:
    """The first of the figure: twelve structures at one length, so that no two processes compile the same."""
    first = warm.spread(shapes.figure())[:12]
    assert {512} == {shape.N for shape in first}
    assert 12 == len({(shape.D, shape.causal, shape.run) for shape in first})


@pytest.mark.parametrize(
    "text", ["N9 D8 causal", "N9 D8 M4 causal", "N9 D8 causal window2", "N9 D8 M4 window3"]
)
def test_the_rule_of_flex_is_the_mask(text: str) -> None:
    shape = parse(text)
    i, j = torch.arange(shape.queries)[:, None], torch.arange(shape.N)
    assert torch.equal(implementations._dense_mask(shape, i), implementations._rule(shape)(0, 0, i, j))


def test_ratios_are_the_first_candidates_time_over_the_others() -> None:
    """A clock that only goes up is a drift; both halves of a group cancel it."""
    rows = rows_of(RIGHT, broken("same", lambda out: out))
    value, low, high = rows["same"].ratio or (0.0, 0.0, 0.0)
    assert low <= value <= high
    assert 1.0 == pytest.approx(value, abs=0.05)


def test_a_row_carries_the_documents_bandwidth_and_exact_pairs() -> None:
    """E4: q, k, v read and out written once, over the median."""
    row = rows_of(RIGHT)["eager"]
    measured = roofs.Roofs(1e9, {"float32": 1e10}, 1e8, one_unit=True)
    plain = row.as_dict(measured, 12345)
    median = plain["summary"]["median"]
    assert (2 * 4 * 48 * 16 * 4 * 2 + 2 * 2 * 48 * 16 * 4 * 2) / median / 1e9 == pytest.approx(plain["gbps"])
    pairs = 2 * 4 * 48 * 49 // 2
    assert 4 * 16 * pairs / median / 1e12 == pytest.approx(plain["tflops"])
    assert 12345 / median / 1e9 == pytest.approx(plain["ledger_gbps"])
    assert "arithmetic" == plain["roof"]["limit"]
    assert (4 * 16 * pairs / 1e10 + pairs / 1e8) / median == pytest.approx(plain["roof"]["share"])


def test_the_documents_example_is_64_mib() -> None:
    """E4: N=4096, d=64, H=32, B=1, fp16."""
    assert 64 * 2**20 == Shape(1, 32, 4096, 64, dtype="float16").bytes


def test_the_figure_sweep_keeps_tokens_and_width() -> None:
    found = list(shapes.figure())
    assert 2 * 3 * 2 * 6 == len(found) == len({shape.name for shape in found})
    assert {(16384, 2048)} == {(shape.B * shape.N, shape.H * shape.D) for shape in found}
    assert {512, 1024, 2048, 4096, 8192, 16384} == {shape.N for shape in found}


@pytest.mark.parametrize("preset", sorted(shapes.PRESETS))
def test_every_name_of_a_preset_is_read_back_as_its_shape(preset: str) -> None:
    for shape in shapes.PRESETS[preset]():
        assert shape.name == parse(shape.name).name


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("N64", "at least N and D"),
        ("N64 D8 X3", "X3"),
        ("N64 D8 H3/2", "multiple"),
        ("N0 D8", "at least 1"),
        ("M/3", "M/3"),
    ],
)
def test_a_case_that_makes_no_sense_is_refused_with_an_example(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse(text)


def test_words_of_a_case_come_in_any_order() -> None:
    assert Shape(2, 8, 64, 32, M=1, Hkv=2, dtype="float16", causal=True, left=7, run="both") == parse(
        "causal window7 both D32 N64 M1 H8/2 B2 float16"
    )


def test_a_journal_gives_back_what_it_was_given_and_drops_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    first = Journal(path, {"plan": 1})
    first.put("a", {"x": 1.5, "y": math.inf})
    with path.open("a") as file:
        file.write('{"key": "' + first.key + '", "step": "b", "res')  # the process died here
    second = Journal(path, {"plan": 1})
    assert {"a": {"x": 1.5, "y": "inf"}} == second.done
    second.put("c", 3)
    assert ["a", "c"] == list(Journal(path, {"plan": 1}).done)


def test_a_journal_of_another_plan_is_not_taken(tmp_path: Path) -> None:
    """Other candidates, protocols or sources must not lend their times."""
    path = tmp_path / "steps"
    Journal(path, {"plan": 1}).put("a", 1)
    assert "a" not in Journal(path, {"plan": 2})
    assert "a" in Journal(path, {"plan": 1})


def test_a_journal_goes_when_the_run_ends_and_stays_when_it_does_not(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    with pytest.raises(KeyboardInterrupt), Journal(path, 1) as journal:
        journal.put("a", 1)
        raise KeyboardInterrupt
    assert path.exists()
    with Journal(path, 1):
        pass
    assert not path.exists()


def test_a_stopped_sweep_goes_on_without_measuring_again(tmp_path: Path) -> None:
    wanted = [replace(SHAPE, N=n) for n in (16, 24, 32)]
    path = tmp_path / "steps"
    seen: list[str] = []

    def stop(step: str) -> None:
        seen.append(step)
        if step == wanted[1].name:
            raise KeyboardInterrupt

    def run(tick: Any, timer: Any) -> sweep.Sweep:
        journal = Journal(path, "test")
        journal.put("roofs", roofs.Roofs(1e9, {"float32": 1e9}, 1e9, True).as_dict())
        return sweep.run(wanted, ("eager",), "cpu", timer, QUICK, journal=journal, tick=tick)

    with pytest.raises(KeyboardInterrupt):
        run(stop, Ticking())
    again = Ticking()
    done = run(lambda step: None, again)
    assert [shape.name for shape in wanted] == [row["case"] for row in done.rows]
    assert QUICK.warmup + QUICK.timed == again.calls, "one shape was left to measure"
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_roofs_are_rates_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofs, "COPY_BYTES", {"cpu": 2**16})
    monkeypatch.setattr(roofs, "PRODUCT_SIDE", {"cpu": 16})
    monkeypatch.setattr(roofs, "EXPONENTIALS", {"cpu": 256})
    found = roofs.probe("cpu", ("float32",), HostTimer())
    assert found.copy > 0 and found.exponentials > 0 and found.products["float32"] > 0


def test_where_a_call_stands_is_its_largest_term() -> None:
    apart = roofs.Roofs(1e9, {"float32": 1e12}, 1e6, one_unit=False)
    found = roofs.stand(SHAPE, 1.0, apart)
    assert "exponentials" == found.limit
    assert SHAPE.call.pairs / 1e6 == pytest.approx(found.share)
    assert "overhead" in str(roofs.stand(SHAPE, 100.0, apart))
    doubted = str(roofs.stand(SHAPE, found.share / 3, apart))
    assert "exponentials (3.0 times its probe, which was disturbed or reads no cache)" == doubted
    both = roofs.stand(replace(SHAPE, run="both"), 1.0, apart)
    assert 2 * found.terms["exponentials"] == pytest.approx(both.terms["exponentials"])


def test_the_ledgers_bytes_are_at_least_what_must_move() -> None:
    from attnproof.ledger import hardware

    moved = sweep.ledger_bytes(Shape(1, 2, 256, 64, dtype="float32"), hardware.get("h200"))
    assert moved is not None and moved >= 3 * 2 * 256 * 64 * 4
    assert sweep.ledger_bytes(Shape(1, 1, 16384, 64), hardware.get("h200")) is None


@pytest.fixture
def module(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch\n"
        "def plain(q, k, v, *, causal, scale):\n"
        "    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)\n"
        "def noncausal(q, k, v, *, scale):\n"
        "    return plain(q, k, v, causal=False, scale=scale), None\n"
        "plain.attnproof = {'align': 'top_left'}\n"
    )
    yield path


def test_anyones_function_joins_in_the_form_that_verify_asks_for(module: Path) -> None:
    shape = Shape(1, 2, 32, 16, dtype="float32", causal=True)
    plain, without = (implementations.load(f"{module}:{name}") for name in ("plain", "noncausal"))
    rows = rows_of(plain, without, shape=shape)
    assert ["PASS", "SKIP"] == [row.status for row in rows.values()]
    assert "PASS" == rows_of(without, shape=replace(shape, causal=False))[without.name].status
    corner = rows_of(plain, shape=replace(shape, M=16))[plain.name]
    assert ("SKIP", "its causal mask is aligned top left") == (corner.status, corner.reason)


def test_an_unknown_candidate_is_refused_with_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"eager.*sdpa:flash"):
        implementations.load("fastest")


def test_names_of_a_device_leave_out_what_cannot_run_there() -> None:
    names = implementations.names("cpu")
    assert "triton" not in names and "eager" == names[-1]
