"""The interactive page in a real browser: its numbers, its controls, its look at phone width."""

from __future__ import annotations

import random
from dataclasses import asdict

import pytest

from attnproof.ledger import explore
from attnproof.ledger.explore import Settings
from attnproof.report import explorer

pytestmark = pytest.mark.web


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page's address."""
    path = tmp_path_factory.mktemp("explorer") / "page.html"
    path.write_text(explorer.page(explore.page_data()), encoding="utf-8")
    return path.as_uri()


@pytest.fixture
def opened(browser, page):
    """The page at desktop size, as first opened."""
    size(browser, 1280, 900)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    browser.get("about:blank")
    browser.get(page)
    yield browser
    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []


def size(browser, width: int, height: int) -> None:
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def text(browser, identity: str) -> str:
    return browser.find_element("id", identity).text


def random_settings(count: int) -> list[Settings]:
    generator = random.Random(0)
    return [
        Settings(
            n=round(2 ** generator.uniform(0, 17)),
            d=generator.randint(1, 256),
            heads=generator.randint(1, 128),
            size=generator.choice([2, 4]),
            causal=generator.random() < 0.5,
            sram=generator.uniform(16, 512),
            bandwidth=generator.uniform(50, 8000),
            products=generator.uniform(1, 3000),
            exps=generator.uniform(0.05, 20),
            l2=generator.uniform(1, 256),
        )
        for _ in range(count)
    ]


def test_the_page_computes_what_python_computes_on_200_random_settings(opened) -> None:
    settings = random_settings(200)
    script = "return arguments[0].map(account)"
    shown = opened.execute_script(script, [asdict(each) for each in settings])
    assert len(shown) == 200
    for each, page_values in zip(settings, shown, strict=True):
        expected = explore.account(each)
        assert set(page_values) == set(expected)
        for name, value in expected.items():
            assert page_values[name] == pytest.approx(value, rel=1e-9, abs=0), (name, each)


def test_the_page_opens_on_the_tutorials_account(opened) -> None:
    rows = text(opened, "bytes").splitlines()
    assert "130.0 MiB" in text(opened, "bytes") and "17.8 MiB" in text(opened, "bytes"), rows
    assert "31.5 FLOP/byte" in text(opened, "bytes")
    assert "balance 201" in text(opened, "roofline")
    assert text(opened, "tiles-note").startswith("64 queries \N{MULTIPLICATION SIGN} 384 keys")
    assert "7.3 times the bytes" in text(opened, "verdict")


def test_nothing_is_fetched_from_anywhere(opened) -> None:
    assert opened.execute_script("return performance.getEntriesByType('resource').length") == 0
    source = opened.page_source
    assert "http://" not in source.replace("http://www.w3.org/2000/svg", "") and "https://" not in source
    assert "default-src 'none'" in source


def test_arrow_keys_move_a_slider_and_the_account_follows(opened) -> None:
    from selenium.webdriver.common.keys import Keys

    before = text(opened, "bytes")
    slider = opened.find_element("id", "n")
    slider.send_keys(Keys.ARROW_RIGHT)
    assert slider.get_attribute("aria-valuetext") == str(round(2**12.125))
    assert opened.find_element("id", "n-number").get_attribute("value") == str(round(2**12.125))
    assert text(opened, "bytes") != before


def test_every_control_is_reached_by_tab_in_order_and_shows_its_focus(opened) -> None:
    from selenium.webdriver.common.keys import Keys

    reached = []
    for _ in range(15):
        opened.switch_to.active_element.send_keys(Keys.TAB)
        active = opened.switch_to.active_element
        reached.append(active.get_attribute("id") or active.get_attribute("class"))
        outline = opened.execute_script("return getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid", reached[-1]
    sliders = ("n", "d", "heads", "sram", "bandwidth")
    pairs = [name for key in sliders for name in (key, f"{key}-number")]
    assert reached == ["skip-link", "theme", "device", "dtype", *pairs, "causal"]


def test_space_on_the_checkbox_draws_the_causal_skips(opened) -> None:
    from selenium.webdriver.common.keys import Keys

    assert opened.find_elements("css selector", "#tiles .skip") == []
    opened.find_element("id", "causal").send_keys(Keys.SPACE)
    assert len(opened.find_elements("css selector", "#tiles .skip")) > 0
    assert len(opened.find_elements("css selector", "#tiles .edge")) > 0
    seen = explore.visits(4096, 64, 384, True)
    assert f"{seen['visited']} visited ({seen['edge']} of them edges)" in text(opened, "tiles-note")


def test_choosing_a_device_sets_its_memory_bandwidth_and_on_chip_memory(opened) -> None:
    from selenium.webdriver.support.ui import Select

    Select(opened.find_element("id", "device")).select_by_value("mi50")
    assert opened.find_element("id", "bandwidth-number").get_attribute("value") == "1024"
    assert opened.find_element("id", "sram-number").get_attribute("value") == "64"
    assert "In doubt for this device: exp per clock" in text(opened, "device-note")


def test_a_number_out_of_range_is_marked_and_changes_nothing(opened) -> None:
    from selenium.webdriver.common.keys import Keys

    before = text(opened, "bytes")
    field = opened.find_element("id", "heads-number")
    field.send_keys(Keys.CONTROL, "a")
    field.send_keys("0")
    assert field.get_attribute("aria-invalid") == "true"
    assert text(opened, "bytes") == before


def test_the_address_keeps_the_settings(opened, page) -> None:
    opened.get("about:blank")
    opened.get(page + "#n=8192&d=128&heads=16&device=h200&sram=256&bandwidth=4800&causal=true")
    s = Settings(8192, 128, 16, 2, True, 256, 4800, 989.4, 3.86496, 60)
    expected = explore.account(s)
    assert f"{expected['naive_intensity']:.1f} FLOP/byte" in text(opened, "bytes")
    assert opened.find_element("id", "device").get_attribute("value") == "h200"


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_no_width_scrolls_sideways(opened, width) -> None:
    size(opened, width, 900)
    assert opened.execute_script("return document.documentElement.scrollWidth - innerWidth") <= 0


def contrast(one: str, other: str) -> float:
    """WCAG contrast of two CSS rgb() colours."""

    def luminance(colour: str) -> float:
        channels = [int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_schemes_are_readable(opened, page, scheme) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    opened.get("about:blank")
    opened.get(page)
    style = "return getComputedStyle(document.querySelector(arguments[0])).getPropertyValue(arguments[1])"
    card = opened.execute_script(style, "section", "background-color")
    for selector in ("section h2", ".soft", "#verdict"):
        assert contrast(opened.execute_script(style, selector, "color"), card) >= 4.5, selector
    for selector in (".bar.naive", ".bar.keys", ".bar.queries", ".bar.once"):
        assert contrast(opened.execute_script(style, selector, "background-color"), card) >= 3, selector


def test_the_button_turns_the_page_dark_and_back(opened) -> None:
    background = "return getComputedStyle(document.body).backgroundColor"
    before = opened.execute_script(background)
    opened.find_element("id", "theme").click()
    assert opened.execute_script(background) != before
    opened.find_element("id", "theme").click()
    assert opened.execute_script(background) == before


def test_pictures_say_in_words_what_they_show(opened) -> None:
    for identity in ("roofline", "tiles"):
        element = opened.find_element("id", identity)
        assert element.get_attribute("role") == "img"
        assert len(element.get_attribute("aria-label")) > 20
