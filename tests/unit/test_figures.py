"""The figures' structure: what is drawn, with which scales and words. How they look was judged by eye."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from attnproof.ledger import pictures
from attnproof.report import figures
from attnproof.report.figure_text import TEXT

pytest.importorskip("matplotlib")

POINT = {"direction": "forward", "working_set": 1, "holds": True}
MEASURED = {
    "points": [
        {**POINT, "implementation": "eager", "counted": 1.1e9, "predicted": 1e9},
        {**POINT, "implementation": "triton", "direction": "backward", "counted": 2e7, "predicted": 3e7},
    ],
    "l2": 60 << 20,
    "device": "a device",
}


@pytest.fixture(scope="module")
def data():
    return {**pictures.data(), "measured": MEASURED}


def drawn(name, data, lang="en", font=None):
    with figures.style(lang, font):
        return figures.FIGURES[name](data[name], figures.words(lang))


def test_both_languages_say_the_same_things_with_the_same_blanks() -> None:
    assert set(TEXT["en"]) == set(TEXT["zh"])
    for key, phrase in TEXT["en"].items():
        blanks = [sorted(re.findall(r"{(\w+)", text)) for text in (phrase, TEXT["zh"][key])]
        assert blanks[0] == blanks[1], key


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_every_figure_is_written_as_svg(data, tmp_path, lang, monkeypatch) -> None:
    monkeypatch.setattr(figures, "chinese_font", lambda: None)
    lines = list(figures.draw_all(data, tmp_path, lang=lang))
    suffix = ".zh" if lang == "zh" else ""
    for name in figures.FIGURES:
        root = ET.parse(tmp_path / f"{name}{suffix}.svg").getroot()
        assert root.tag.endswith("svg")
    assert sum(line.startswith("wrote") for line in lines) == len(figures.FIGURES) * (
        2 if lang == "en" else 1
    )


def test_png_files_are_pngs_of_a_readable_size(data, tmp_path) -> None:
    list(figures.draw_all(data, tmp_path, only=["growth"]))
    head = (tmp_path / "growth.png").read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(head[16:20], "big") > 1200


def test_without_a_chinese_font_the_png_is_left_out_with_advice_and_the_svg_keeps_text(
    data, tmp_path, monkeypatch
) -> None:
    """A PNG of empty boxes would be worse than none."""
    monkeypatch.setattr(figures, "chinese_font", lambda: None)
    lines = list(figures.draw_all(data, tmp_path, lang="zh", only=["tiling"]))
    assert not (tmp_path / "tiling.zh.png").exists()
    assert "no Chinese font is installed" in lines[1] and "apt install" in lines[1]
    svg = (tmp_path / "tiling.zh.svg").read_text(encoding="utf-8")
    assert TEXT["zh"]["tiling.memory"] in svg
    assert "Noto Sans CJK SC" in svg


def test_with_a_chinese_font_no_letter_is_missing(data, tmp_path) -> None:
    """Warnings are errors here, and matplotlib warns for each glyph that a font lacks."""
    if figures.chinese_font() is None:
        pytest.skip("no Chinese font on this machine")
    list(figures.draw_all(data, tmp_path, lang="zh"))
    assert len(list(tmp_path.glob("*.zh.png"))) == len(figures.FIGURES)


def test_the_same_data_gives_the_same_file(data, tmp_path) -> None:
    """A figure under version control must not change when nothing did."""
    for folder in ("a", "b"):
        list(figures.draw_all(data, tmp_path / folder, only=["growth"]))
    for name in ("growth.svg", "growth.png"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_the_tiling_figure_has_a_cell_per_tile_and_both_memories(data) -> None:
    figure = drawn("tiling", data)
    left, right = figure.axes
    assert len(left.patches) == 64
    words = [text.get_text() for text in right.texts]
    assert "device memory: 516 KiB" in words
    assert "never stored: s and p, 4 MiB" in words
    assert left.get_title(loc="left") == "36 of 64 tiles computed"
    assert [text.get_text() for text in left.get_legend().get_texts()][2] == "skipped: never loaded"


def test_the_growth_figure_is_log_log_with_the_80_gib_line(data) -> None:
    left, right = drawn("growth", data).axes
    for axes in (left, right):
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert [list(line.get_ydata()) for line in left.lines] == [
        data["growth"]["naive"],
        data["growth"]["tiled"],
    ]
    assert list(right.lines[2].get_ydata()) == [80 * 2**30] * 2
    assert {line.get_linestyle() for line in left.lines} == {"-", "--"}  # not colour alone


def test_the_intensity_figure_marks_balance_and_crossing(data) -> None:
    (axes,) = drawn("intensity", data).axes
    assert f"{axes.lines[2].get_ydata()[0]:.0f}" == "201"
    assert list(axes.lines[3].get_xdata()) == [2048, 2048]
    saw = dict(zip(data["intensity"]["lengths"], data["intensity"]["tiled"], strict=True))
    assert saw[384] > saw[385]


def test_the_measured_figure_has_filled_and_open_points_and_two_bands(data) -> None:
    (axes,) = drawn("measured", data).axes
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert names == ["within a factor of two", "within 10%", "eager, forward", "triton, backward"]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    points = axes.collections[2:]
    assert [list(map(tuple, each.get_offsets())) for each in points] == [[(1e9, 1.1e9)], [(3e7, 2e7)]]


def test_the_planner_map_has_a_cell_per_block_size_and_words_for_every_refusal(data) -> None:
    axes = drawn("planner", data).axes[0]
    words = [text.get_text() for text in axes.texts]
    assert len(words) == 25
    assert sum(word.startswith("best") for word in words) == 1
    assert {"spills", "idle"} <= set(words)


def test_the_bank_map_shows_the_conflict_and_both_cures(data) -> None:
    plain, padded, swizzled, *_ = drawn("banks", data).axes
    assert plain.get_title(loc="left") == "plain rows: 64 clocks"
    assert padded.get_title(loc="left") == "rows padded by 16 B: 8 clocks"
    assert swizzled.get_title(loc="left") == "chunks swizzled by row: 8 clocks"
    assert plain.collections[0].get_array().max() == 8
    assert padded.collections[0].get_array().max() == 1


def test_a_figure_without_its_record_is_left_out_and_says_what_it_needs(tmp_path) -> None:
    (line,) = figures.draw_all(pictures.data(), tmp_path, only=["measured"])
    assert line == "left out measured: it needs a record of `attnproof ledger --measure` (--record PATH)"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"only": ["x"]}, "figures: expected names among tiling"),
        ({"lang": "fr"}, "lang: expected one of en, zh, got 'fr'"),
    ],
)
def test_unknown_names_are_refused(tmp_path, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        list(figures.draw_all(pictures.data(), tmp_path, **options))


def test_a_record_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="record: expected results of `ledger --measure`, got kind 'verify'"):
        pictures.measured({"kind": "verify", "results": [{"case": "x"}]})


def test_a_missing_matplotlib_is_explained(monkeypatch) -> None:
    def absent(name: str):
        raise ImportError(name)

    monkeypatch.setattr(figures, "import_module", absent)
    with pytest.raises(
        ImportError, match=r"matplotlib is not installed \(pip install 'attnproof\[report\]'\)"
    ):
        figures.chinese_font()
