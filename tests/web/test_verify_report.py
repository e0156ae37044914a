"""The verify report in a real browser: opened from a file, clicked, sorted, filtered, in light and dark."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attnproof.cases import find
from attnproof.report import html
from attnproof.verify import records, selftest, suite
from attnproof.verify.mutants import catalogue, kernel, matrix

pytestmark = pytest.mark.web


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """Two kernels: one right, one that loses rows; and a self-test of two mutants."""
    cases = [
        find(name)
        for name in ("normal-128/bfloat16", "bias/float16", "mask-dead-rows/float32", "gqa-8-2/bfloat16")
    ]
    answers = suite.Answers()
    rows = suite.run(kernel.correct(), cases, 0, answers)
    broken = suite.run(kernel.mutate(catalogue.find("tail-rows-unwritten")), cases, 0, answers)
    broken[0].status = "FINDING"
    fates = [matrix.fate(catalogue.find(name), cases, 0, answers) for name in ("lse-base-2", "heads-tiled")]
    score = selftest.Score("test", fates, matrix.Green(), [])
    protocol = {"tier": "test", "seed": 0, "sharpness": score.sentence, "selftest": selftest.entries(score)}
    return records.record("verify", protocol, [records.from_verdict(verdict) for verdict in rows + broken])


@pytest.fixture(scope="module")
def address(document: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("report") / "verify.html"
    extra = html.Section("Real input", html.table(("layer", "error"), [(1, 1e-7)]))
    path.write_text(html.render(document, [extra]), encoding="utf-8")
    return path.as_uri()


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    """The page as first opened; whatever the console says in a test fails it."""
    browser.set_window_size(1280, 900)
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "light"}]}
    )
    browser.get("about:blank")
    browser.get(address)
    yield browser
    assert [entry["message"] for entry in browser.get_log("browser")] == []


def cells(page: Any, column: int) -> list[str]:
    return [cell.text for cell in page.find_elements("css selector", f"#table tr.row td:nth-child({column})")]


def click(page: Any, selector: str) -> None:
    page.execute_script("arguments[0].click()", page.find_element("css selector", selector))


def choose(page: Any, identity: str, value: str) -> None:
    script = "const e = document.getElementById(arguments[0]); e.value = arguments[1]; e.dispatchEvent(new Event('input'))"
    page.execute_script(script, identity, value)


def test_the_page_loads_nothing_and_shows_every_result(page: Any, document: dict[str, Any]) -> None:
    loaded = page.execute_script("return performance.getEntriesByType('resource').length")
    assert 0 == loaded
    assert (
        f"{len(document['results'])} of {len(document['results'])}" == page.find_element("id", "count").text
    )
    assert len(document["results"]) == len(page.find_elements("css selector", "#table tr.row"))


def test_the_worst_comes_first_and_the_headline_says_so(page: Any) -> None:
    # one place in every tile of rows is lost in three of the four cases
    assert ["fail", "fail"] == cells(page, 1)[:2]
    assert "do not hold" in page.find_element("css selector", ".headline").text
    assert "finding" in [pill.text for pill in page.find_elements("css selector", "#cards .pill")]


def test_columns_sort_both_ways_by_number(page: Any) -> None:
    click(page, "th[data-key=bound] button")
    down = cells(page, 7)
    click(page, "th[data-key=bound] button")
    up = cells(page, 7)
    numbers = [float(text) for text in down if text not in ("\u2013", "inf")]
    assert sorted(numbers, reverse=True) == numbers
    assert [float(text) for text in up if text not in ("\u2013", "inf")] == numbers[::-1]
    assert "ascending" == page.find_element("css selector", "th[data-key=bound]").get_attribute("aria-sort")


def test_filters_narrow_and_the_button_clears_them(page: Any) -> None:
    choose(page, "who", "streaming")
    assert {"streaming"} == set(cells(page, 3))
    choose(page, "text", "dead-rows")
    assert ["mask-dead-rows/float32"] == [text.splitlines()[0] for text in cells(page, 2)]
    choose(page, "text", "no such thing")
    assert [] == cells(page, 2)
    click(page, "#reset")
    assert 8 == len(cells(page, 2))


def test_a_row_opens_to_its_tensors_and_the_command_that_replays_it(page: Any) -> None:
    click(page, "#table tr.row")
    detail = page.find_element("css selector", "tr.detail")
    assert "attnproof explain-case" in detail.text
    assert {"out", "lse"} <= {
        cell.text for cell in detail.find_elements("css selector", "tbody td:first-child")
    }
    assert "all NaN there" in detail.text
    click(page, "#table tr.row")
    assert [] == page.find_elements("css selector", "tr.detail")


def test_a_cell_of_the_overview_filters_the_table(page: Any) -> None:
    click(page, "#grid td.cell.FAIL button")
    assert {"tail-rows-unwritten"} == set(cells(page, 3))
    assert 1 == len(cells(page, 3))


def test_every_tensor_is_a_dot_and_a_dot_opens_its_case(page: Any, document: dict[str, Any]) -> None:
    dots = page.find_elements("css selector", "#bound-chart circle")
    tensors = sum(len(result["tensors"]) for result in document["results"])
    assert 0 < len(dots) <= tensors
    page.execute_script(
        "document.querySelector('#bound-chart circle').dispatchEvent(new MouseEvent('click'))"
    )
    assert 1 == len(page.find_elements("css selector", "tr.detail"))


def test_no_chart_draws_outside_of_itself(page: Any) -> None:
    """A value off the scale must stop at the edge, not leave the picture."""
    script = """
return [...document.querySelectorAll('svg circle')].filter(c => {
  const box = c.ownerSVGElement.viewBox.baseVal, x = +c.getAttribute('cx'), y = +c.getAttribute('cy');
  return !(x >= 0 && x <= box.width && y >= 0 && y <= box.height);
}).length"""
    assert 0 == page.execute_script(script)


def test_the_second_opinion_lists_the_mutants_that_fixed_thresholds_pass(page: Any) -> None:
    section = page.find_element("css selector", "#mutants")
    assert "Of 2 broken kernels the fixed thresholds miss" in section.text
    assert "lse-base-2" in section.text


def test_sections_of_others_are_in_the_page_and_in_the_navigation(page: Any) -> None:
    assert "Real input" in page.find_element("css selector", "nav").text
    assert "1.0e-07" in page.find_element("id", "real-input").text


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_themes_have_readable_contrast(page: Any, scheme: str) -> None:
    """Text against its background, by the usual ratio of 4.5."""
    if scheme == "dark":
        click(page, "#theme")
    script = """
const rgb = text => text.match(/[\\d.]+/g).map(Number);
const light = c => { const [r, g, b] = rgb(c).slice(0, 3).map(x => { x /= 255; return x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4; });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const back = n => { while (n) { const c = getComputedStyle(n).backgroundColor; if (!c.includes(', 0)') && c.startsWith('rgb(')) return c; n = n.parentElement; } return 'rgb(255,255,255)'; };
return ['.headline', '.lead', '.facts dt', '.pill.FAIL', '.pill.FINDING', '.pill.PASS', 'nav a', 'th button', '.card code'].map(s => {
  const node = document.querySelector(s), a = light(getComputedStyle(node).color), b = light(back(node));
  return [s, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)];
})"""
    poor = [(selector, ratio) for selector, ratio in page.execute_script(script) if ratio < 4.5]
    assert [] == poor
    assert ("dark" if scheme == "dark" else None) == page.execute_script(
        "return document.documentElement.dataset.theme || null"
    )


def test_at_phone_width_nothing_but_tables_scrolls_sideways(page: Any) -> None:
    metrics = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    wide = page.execute_script("return document.documentElement.scrollWidth")
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert wide <= 390


def test_the_embedded_data_is_the_record(page: Any, document: dict[str, Any]) -> None:
    data = json.loads(page.execute_script("return document.getElementById('data').textContent"))
    assert [result["case"] for result in document["results"]] == [
        result["case"] for result in data["results"]
    ]
