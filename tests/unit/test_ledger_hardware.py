"""The device table, its doubt marks, profiles and detection."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from attnproof.ledger import hardware
from attnproof.ledger.hardware import Figure, get


@pytest.mark.parametrize("name", hardware.names())
def test_every_row_has_positive_figures_with_units_and_sources(name) -> None:
    row = get(name)
    for key, figure in row.figures().items():
        assert figure.value > 0, key
        assert figure.unit and figure.source, key


@pytest.mark.parametrize("name", [n for n in hardware.names() if n != "cpu"])
def test_peaks_agree_with_units_and_clock(name) -> None:
    """A slip of a digit in the table would show as a device with an impossible number of lanes."""
    row = get(name)
    lanes = row.vector_float32.value * 1e12 / 2 / (row.units.value * row.clock.value * 1e9)
    assert 60 <= lanes <= 140  # 64 or 128 lanes of a unit, fp32 sometimes quoted at another boost clock
    assert row.shared_per_block.value <= row.shared_per_unit.value <= row.onchip_per_unit.value


def test_uncertain_figures_carry_their_mark_when_shown() -> None:
    assert str(get("mi355x").vector_float32) == "157.3? TFLOP/s"
    assert str(get("h100").vector_float32) == "66.9 TFLOP/s"


def test_the_exp_rate_of_an_h100_is_the_known_3_9_tera() -> None:
    assert round(get("h100").exp_rate / 1e12, 1) == 3.9


def test_names_are_found_whatever_their_spelling() -> None:
    assert get("RTX 4090") == get("rtx4090")
    assert get("NVIDIA H200 SXM").name == "h200"


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"hardware: expected one of a100-40gb, .*, got 'mi51'"):
        get("mi51")


def test_half_products_on_a_device_without_a_matrix_unit_run_on_packed_halves() -> None:
    mi50 = get("mi50")
    assert mi50.matrix_unit("float16") is None
    assert mi50.product_rate("float16") == 26.5e12
    assert mi50.product_rate("bfloat16") == 13.3e12  # no bf16 instruction: fp32 FMA


def test_a_dtype_without_a_rate_is_refused() -> None:
    with pytest.raises(ValueError, match="h100 has no float64 rate"):
        get("h100").product_rate("float64")
    with pytest.raises(ValueError, match="dtype: expected one of float16"):
        get("h100").product_rate("int8")


def write(tmp_path, text):
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_profile_replaces_figures_and_keeps_the_rest(tmp_path) -> None:
    path = write(
        tmp_path,
        'base = "mi50"\nname = "capped"\n[figures]\nmemory_bandwidth = 867\n'
        'clock = {value = 1.2, source = "power cap", uncertain = true}\n',
    )
    row = hardware.resolve(str(path))
    assert row.name == "capped"
    assert row.memory_bandwidth == Figure(867.0, "GB/s", "profile mine.toml", False)
    assert row.clock == Figure(1.2, "GHz", "power cap", True)
    assert row.units == get("mi50").units
    assert row.measured == ("clock", "memory_bandwidth")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[figures]\nclock = 1\n", "expected a key 'base'"),
        ('base = "mi51"\n', "hardware: expected one of"),
        ('base = "mi50"\n[figures]\nspeed = 1\n', "got 'speed'"),
        (
            'base = "mi50"\n[figures]\nclock = -1\n',
            r"figures.clock: expected a positive number of GHz, got -1",
        ),
        ('base = "mi50"\n[figures]\nclock = true\n', "expected a positive number of GHz, got True"),
        ('base = "mi50"\n[figures]\nclock = {unit = "MHz"}\n', "expected value, source, uncertain"),
        ('base = "mi50"\ncolour = 1\n', "got 'colour'"),
        ("base = \n", "expected TOML"),
    ],
)
def test_a_wrong_profile_is_refused_with_the_place(tmp_path, text, message) -> None:
    with pytest.raises(ValueError, match=message):
        hardware.load_profile(write(tmp_path, text))


def test_a_profile_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"expected a readable .toml profile, got 'nowhere.toml'"):
        hardware.resolve("nowhere.toml")


def gpu(monkeypatch, **properties):
    """A torch that sees one device with these properties."""
    device = SimpleNamespace(gcnArchName="", **properties)
    cuda = SimpleNamespace(
        is_available=lambda: True, current_device=lambda: 0, get_device_properties=lambda _: device
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))


@pytest.mark.parametrize(("reported", "taken"), [(60, 50), (25, 25)])
def test_a_known_gpu_takes_units_and_a_smaller_cache_from_its_driver(monkeypatch, reported, taken) -> None:
    """A partition has less than the table says; more than that was reported and did not serve."""
    gpu(
        monkeypatch,
        name="NVIDIA H200",
        multi_processor_count=66,
        total_memory=150 << 30,
        L2_cache_size=reported << 20,
    )
    row = hardware.detect()
    assert (row.name, row.units.value, row.l2_size.value) == ("h200", 66, taken)
    assert ("driver" == row.l2_size.source) == (taken == reported)


def test_two_cards_of_one_name_are_told_apart_by_their_memory(monkeypatch) -> None:
    gpu(monkeypatch, name="NVIDIA A100-SXM4-40GB", multi_processor_count=108, total_memory=42 << 30)
    assert hardware.detect().name == "a100-40gb"
    gpu(monkeypatch, name="NVIDIA A100-SXM4-80GB", multi_processor_count=108, total_memory=85 << 30)
    assert hardware.detect().name == "a100-80gb"


def test_an_amd_device_is_found_by_its_architecture(monkeypatch) -> None:
    gpu(monkeypatch, name="AMD Radeon Graphics", multi_processor_count=60, total_memory=16 << 30)
    sys.modules["torch"].cuda.get_device_properties(0).gcnArchName = "gfx906:sramecc+:xnack-"
    assert hardware.detect().name == "mi50"


def test_a_gpu_outside_the_table_is_refused_and_not_guessed(monkeypatch) -> None:
    gpu(monkeypatch, name="Unheard Of 9000", multi_processor_count=1, total_memory=1)
    with pytest.raises(ValueError, match="expected a device of the table, got 'Unheard Of 9000'"):
        hardware.detect()


def test_without_a_gpu_the_cpu_row_takes_this_machines_cores(monkeypatch) -> None:
    monkeypatch.setitem(
        sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False))
    )
    row = hardware.detect()
    assert row.vendor == "cpu"
    assert row.units.value >= 1
    per_core = get("cpu").vector_float32.value / get("cpu").units.value
    assert row.vector_float32.value == pytest.approx(per_core * row.units.value)
