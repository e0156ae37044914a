"""The measuring report in a real browser: opened from a file, in light and dark, narrow and wide, figures saved."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attnproof.measure import published, stats
from attnproof.report import measured
from attnproof.verify import records

pytestmark = pytest.mark.web


MADE_OF = {"launches": 3.0, "registers": 168.0, "shared_bytes": 65536.0, "spills": 16.0, "code_bytes": 9000.0}


def measure(device: str) -> dict[str, Any]:
    """A record with two candidates at three lengths, one of which is wrong at the last; times are made up."""
    rows: list[dict[str, Any]] = []
    for n in (512, 1024, 2048):
        for factor, name in enumerate(("ours", "theirs"), 1):
            samples = [1e-6 * n * factor * (1 + 0.01 * at) for at in range(50)]
            shape = {"run": "forward", "B": 1, "H": 4, "Hkv": 4, "M": n, "N": n, "D": 64}
            row = {
                "case": f"forward N{n}",
                "candidate": name,
                "dtype": "float32",
                "status": "PASS",
                "reason": "",
            }
            row |= {"shape": shape | {"causal": False, "left": -1, "pairs": n * n}}
            if (n, name) == (2048, "theirs"):
                rows.append(row | {"status": "FAIL", "reason": "out: hard bound 3 > 1 </script>"})
                continue
            rows.append(
                row
                | {
                    "samples": samples,
                    "summary": stats.summarise(samples).as_dict(),
                    "ratio": [1.0 / factor, 0.9 / factor, 1.1 / factor],
                    "tflops": n / 1e4 / factor,
                    "gbps": n / 100 / factor,
                    "deterministic": {"rms": 1e-7} | (MADE_OF if device != "cpu" and factor == 1 else {}),
                    "roof": {"intensity": n / 16, "sentence": "arithmetic (50% of its roof)"},
                }
            )
    rooftops = {"copy": 1e10, "products": {"float32": 1e12}, "exponentials": 1e9, "one_unit": True}
    protocol = {
        "cache": "warm",
        "warmup": 10,
        "timed": 50,
        "order": "ABBA",
        "timer": "clock",
        "roofs": rooftops,
    }
    record = records.record("measure", protocol, rows)
    record["environment"]["device"] = device
    return record


def growth() -> list[dict[str, Any]]:
    """Memory, drift and training."""
    exponent = {"value": 2.0, "low": 1.9, "high": 2.1}
    n = [1024, 2048, 4096]
    base = {"candidate": "ours", "dtype": "bfloat16", "status": "PASS", "reason": ""}
    memory = base | {"case": "memory", "n": n, "bytes": [x * x for x in n], "exponent": exponent}
    points = [{"n": x, "z_rms": 0.9, "rms": 1 / x, "bias": 0.0} for x in n]
    mutant = [{"n": x, "z_rms": x / 500, "rms": x * 1e-8, "bias": 0.0} for x in n]
    drift = [
        base | {"case": "drift", "points": points, "slope": exponent},
        base
        | {"case": "drift", "candidate": "half", "status": "FINDING", "points": mutant, "slope": exponent},
    ]
    curve = {"case": "train tiny", "losses": [5.0, 4.0, 3.5], "final_loss": 3.5, "tokens_per_second": 10.0}
    train = [
        base | curve | {"seed": seed, "candidate": name, "peak_bytes": 2**20}
        for name, seed in (("eager", 0), ("ours", 0), ("eager", 1), ("eager", 2))
    ]
    return [
        records.record("memory", {}, [memory]),
        records.record("drift", {"band": 1.3}, drift),
        records.record("train", {"gains": gains()}, train),
    ]


def gains() -> dict[str, Any]:
    """What `train` keeps of the published gains, for one model that was trained and made-up speeds."""
    rows = [
        {"candidate": name, "seed": 0, "tokens_per_second": speed, "peak_bytes": peak}
        for name, speed, peak in (("eager", 100.0, 300), ("attnproof", 250.0, 100))
    ]
    models = [one.as_dict() for one in published.beside("gpt2-small", 1024, rows)]
    return {"source": published.SOURCE, "models": models}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("report") / "measured.html"
    path.write_text(measured.render([measure("cpu"), measure("Some GPU"), *growth()]), encoding="utf-8")
    return path.as_uri()


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    """The page as first opened; whatever the console says in a test fails it."""
    look(browser, 1280, "light")
    browser.get("about:blank")
    browser.get(address)
    yield browser
    assert [entry["message"] for entry in browser.get_log("browser")] == []


def look(browser: Any, width: int, scheme: str) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


def text(page: Any, selector: str) -> list[str]:
    return [node.text for node in page.find_elements("css selector", selector)]


def test_the_page_loads_nothing_and_has_a_section_for_every_kind(page: Any) -> None:
    assert 0 == page.execute_script("return performance.getEntriesByType('resource').length")
    assert (
        ["Speed", "Roofline", "Samples", "Made of", "Memory", "Drift", "Training"]
        == text(page, "nav a")
        == text(page, "h2")
    )


def test_a_candidate_without_a_verdict_has_a_reason_and_no_point(page: Any) -> None:
    """The time of a wrong kernel must not be anywhere on the page."""
    cells = text(page, "#speed td")
    assert "out: hard bound 3 > 1 </script>" in cells
    assert "do not hold" in text(page, ".headline")[0]
    figure = "#speed-charts figure:first-child"
    assert 3 * 2 + 2 * 2 == len(page.find_elements("css selector", f"{figure} circle"))


def test_two_machines_have_curves_of_their_own(page: Any) -> None:
    keys = text(page, "#speed-charts figure:first-child .keys span")
    assert 4 == len(keys) == len(set(keys))
    assert any("Some GPU" in key for key in keys)
    assert 5 == len(page.find_elements("css selector", "dl.facts"))


def test_the_roofline_has_the_roofs_of_every_machine(page: Any) -> None:
    assert 2 == len(page.find_elements("css selector", "#roofline-charts path.roof"))
    assert 10 == len(page.find_elements("css selector", "#roofline-charts circle"))


def test_choosing_a_case_shows_its_samples(page: Any) -> None:
    before = text(page, "#samples-charts figcaption small")
    script = "const e = document.getElementById('samples-choice'); e.value = 'forward N2048'; e.dispatchEvent(new Event('input'))"
    page.execute_script(script)
    assert (["forward N512"], ["forward N2048"]) == (before, text(page, "#samples-charts figcaption small"))
    assert 2 == len(page.find_elements("css selector", "#samples-charts path.curve"))


def test_the_band_of_the_model_is_drawn_where_a_model_is(page: Any) -> None:
    assert 1 == len(page.find_elements("css selector", "#drift-charts figure:first-child line.limit"))
    assert 1 == len(page.find_elements("css selector", "#drift-charts figure:first-child path.dashed"))


def test_figures_are_saved_as_svg_and_png_with_their_colours(page: Any) -> None:
    made = page.execute_script("return asSvg(document.querySelector('#memory-charts svg'))")
    assert made.startswith("data:image/svg+xml")
    assert "var%28" not in made and "stroke%3A" in made.replace("stroke:", "stroke%3A")
    png = page.execute_async_script("asPng(document.querySelector('#memory-charts svg'), arguments[0])")
    assert b"\x89PNG" == base64.b64decode(png.split(",")[1])[:4]


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_the_window_and_text_can_be_read(page: Any, width: int, scheme: str) -> None:
    look(page, width, scheme)
    assert page.execute_script("return document.documentElement.scrollWidth") <= width
    paper, ink = page.execute_script(
        "const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]"
    )
    bright = [sum(map(int, colour.removeprefix("rgb(").rstrip(")").split(","))) for colour in (paper, ink)]
    assert (bright[0] > bright[1]) == (scheme == "light")
    assert abs(bright[0] - bright[1]) > 400


def test_the_button_switches_the_theme(page: Any) -> None:
    page.find_element("id", "theme").click()
    assert "dark" == page.execute_script("return document.documentElement.dataset.theme")


def test_the_data_is_the_records_and_cannot_end_its_element(page: Any) -> None:
    data = json.loads(page.execute_script("return document.getElementById('data').textContent"))
    assert [[512, 0.0512], [1024, 0.1024], [2048, 0.2048]] == data["figures"]["speed"][
        "forward, D 64, 4 heads, float32"
    ][0]["series"][0]["points"]


def test_what_calls_are_made_of_is_a_table_of_those_that_were_counted(page: Any) -> None:
    rows = text(page, "#made-of tbody tr")
    assert 3 == len(rows)
    assert all(row.endswith("3 168 65536 16 9000") for row in rows)


def test_published_gains_stand_beside_ours_and_a_model_that_was_not_trained_says_so(page: Any) -> None:
    rows = [
        row for row in text(page, "#training tbody tr") if row.startswith(("gpt2-small", "bert-large", "lra"))
    ]
    assert ["bert-large", "gpt2-small", "lra"] == sorted(row.split()[0].rstrip(",") for row in rows)
    ours = next(row for row in rows if row.startswith("gpt2-small"))
    assert "3.00x" in ours and ours.endswith("2.50x 1024 3.00x")
    assert all(row.endswith("not run - -") for row in rows if row != ours)
    assert any("arXiv 2205.14135" in caption for caption in text(page, "#training caption"))


def test_a_page_without_any_time_still_draws_the_rest(browser: Any, tmp_path: Path) -> None:
    """An empty section once ended the script, and every figure after it was missing."""
    record = measure("cpu")
    for row in record["results"]:
        row["status"] = "FAIL"
        for name in ("samples", "summary"):
            row.pop(name, None)
    path = tmp_path / "measured.html"
    path.write_text(measured.render([record, *growth()]), encoding="utf-8")
    browser.get(path.as_uri())
    assert [] == [entry["message"] for entry in browser.get_log("browser")]
    assert 0 == len(browser.find_elements("css selector", "#speed-charts svg"))
    assert 1 == len(browser.find_elements("css selector", "#memory-charts svg"))


def test_curves_of_other_seeds_are_named_by_their_seed_and_dashed_in_the_key_too(page: Any) -> None:
    keys = page.find_elements("css selector", "#train-charts .keys span")
    assert ["eager", "ours", "eager, seed 1", "eager, seed 2"] == [key.text for key in keys]
    assert 2 == len(page.find_elements("css selector", "#train-charts .keys i.dashed"))


def test_small_numbers_on_an_axis_have_no_zero_behind_the_point(page: Any) -> None:
    assert ["5e-5", "1.5e-5", "2e4"] == page.execute_script("return [5e-5, 1.5e-5, 2e4].map(short)")
