"""The source documents' numbers, to every digit they give."""

from __future__ import annotations

import pytest

from attnproof.ledger import activations, documents
from attnproof.ledger.hardware import GIB, KIB, MIB, get

A100 = get("a100-40gb")


def test_the_tutorial_tile_of_an_a100_is_384_keys_by_64_queries() -> None:
    assert documents.onchip_elements(A100, "float16") == 98304
    assert documents.tile(98304, 64) == (64, 384)


def test_the_io_ledger_at_4096_is_130_mib_against_17_8() -> None:
    row = documents.io_row(4096)
    assert f"{row.naive_bytes / MIB:.0f}" == "130"
    assert f"{row.flash_bytes / MIB:.1f}" == "17.8"
    assert f"{row.ratio:.1f}" == "7.3"
    assert f"{row.naive_intensity:.1f}" == "31.5"


def test_the_balance_point_of_the_tutorial_is_201_flop_per_byte() -> None:
    assert f"{documents.balance(A100, 'float16'):.0f}" == "201"


def test_the_tile_loop_passes_the_balance_point_from_2048() -> None:
    assert documents.first_compute_bound() == 2048


def test_the_crossing_is_a_saw_between_powers_of_two() -> None:
    """The claim "from N=2048" holds for powers of two; a seventh tile column costs it back for a while."""
    above = [
        n
        for n in range(2045, 2400)
        if documents.io_row(n).flash_intensity >= documents.balance(A100, "float16")
    ]
    assert above == [*range(2045, 2305), *range(2352, 2400)]


def test_the_io_ledger_at_32768_is_1061_mib_against_8208() -> None:
    """The tutorial writes 8.2 GiB for the second: 8208 MiB over 1000. In binary units it is 8.02 GiB."""
    row = documents.io_row(32768)
    assert row.flash_bytes == 1113063424  # 1061.5 MiB exactly
    assert row.naive_bytes // MIB == 8208
    assert f"{row.naive_bytes / MIB / 1000:.1f}" == "8.2"
    assert f"{row.naive_bytes / GIB:.2f}" == "8.02"


def test_the_activation_ledger_gives_every_number_of_the_tutorial() -> None:
    short, long = documents.activation_row(4096), documents.activation_row(32768)
    assert f"{short.eager_bytes / GIB:.2f}" == "2.39"
    assert f"{short.linear_bytes / GIB:.3f}" == "0.141"
    assert f"{short.ratio:.0f}" == "17"
    assert f"{short.layers * short.eager_bytes / GIB:.1f}" == "76.5"
    assert f"{short.layers * short.linear_bytes / GIB:.1f}" == "4.5"
    assert f"{long.layers * long.eager_bytes / GIB / 1024:.2f}" == "4.54"
    assert f"{long.layers * long.linear_bytes / GIB:.0f}" == "36"


def test_the_engineers_mi50_tile_takes_40_kib() -> None:
    assert documents.mi50_budget() == {"q": 16 * KIB, "k": 8 * KIB, "v": 8 * KIB, "next": 8 * KIB}
    assert sum(documents.mi50_budget().values()) <= get("mi50").shared_per_block.value * KIB


@pytest.mark.parametrize(
    "report", [documents.io_report, documents.activation_report, documents.engineer_report]
)
def test_a_report_line_begins_with_what_the_document_says_or_explains_why_not(report) -> None:
    """A reader compares the two columns; a difference without a note would be a mistake of ours."""
    for line in report():
        number = line.said.removeprefix("about ").split()[0].removesuffix("x").removeprefix("N=")
        shown = line.computed.removesuffix("x").removeprefix("N=")
        assert shown.startswith(number.rstrip(",")) or line.note


BLOCK = activations.Block(
    batch=2,
    length=1024,
    heads=8,
    kv_heads=2,
    head_dim=64,
    value_dim=32,
    model_dim=512,
    dropout=True,
    masked=True,
)


def test_eager_keeps_three_squares_with_dropout_and_ours_none() -> None:
    square = 2 * 8 * 1024 * 1024
    eager = {t.name: t.bytes for t in activations.kept(BLOCK, "eager")}
    assert (eager["p"], eager["dropout mask"], eager["dropped p"]) == (2 * square, square, 2 * square)
    assert max(t.bytes for t in activations.kept(BLOCK, "ours")) == 2 * 8 * 1024 * 64 * 2


def test_grouped_heads_are_kept_repeated_by_eager_only() -> None:
    of = {name: {t.name: t.bytes for t in activations.kept(BLOCK, name)} for name in ("eager", "ours")}
    assert of["eager"]["k"] == 4 * of["ours"]["k"]
    assert of["eager"]["v"] == 4 * of["ours"]["v"]


def test_what_ours_keeps_grows_linearly_with_the_length() -> None:
    def total(length: int) -> int:
        block = activations.Block(1, length, 8, 8, 64, 64, 512)
        return activations.total(activations.kept(block, "ours"))

    assert total(4096) == 4 * total(1024)


def test_a_checkpoint_keeps_its_input_and_pays_with_ours_in_the_backward_pass() -> None:
    kept = activations.total(activations.kept(BLOCK, "checkpoint"))
    assert kept == 2 * 1024 * 512 * 2
    ours = activations.total(activations.kept(BLOCK, "ours"))
    assert activations.backward_transient(BLOCK, "checkpoint") == ours - kept + 4 * 2 * 8 * 1024


def test_eager_holds_the_scores_beside_the_probabilities_while_it_runs() -> None:
    square = 2 * 8 * 1024 * 1024 * 2
    assert activations.forward_transient(BLOCK, "eager") == square
    assert activations.backward_transient(BLOCK, "eager") == 2 * square
    assert activations.forward_transient(BLOCK, "ours") == 0


def test_an_unknown_implementation_is_refused_by_name() -> None:
    with pytest.raises(
        ValueError, match="implementation: expected one of eager, sdpa, ours, checkpoint, got 'x'"
    ):
        activations.kept(BLOCK, "x")
