"""The page of a sweep: names are escaped, and it needs nothing from elsewhere."""

import re

import pytest

from tests.trainer.sweep.outcomes import outcome, result, swept
from trainer.sweep import page
from trainer.sweep.results import setting


def test_the_page_escapes_names_and_loads_nothing():
    text = page.render(result("optimizer.lr", "network.dim"))
    assert "<b>sweep</b>" not in text
    assert "&lt;b&gt;sweep" in text
    assert not re.search(r"https?://|<link|src=", text)
    assert re.findall(r"<script[^>]*>", text) == ["<script>"]


def test_a_failed_setting_is_on_the_page():
    found = result("optimizer.lr")
    found["rows"].append(setting(9, {"optimizer.lr": "1e9"}, [], "The loss is nan."))
    assert "The loss is nan." in page.render(found)


def test_the_scores_of_one_seed_are_not_called_means():
    text = page.render(swept([setting(0, {"a": "1"}, [outcome(0, 0.5)])]))
    assert "1 setting (grid), each trained with 1 seed. Scores are of validation classes." in text
    assert "tested over classes, which are drawn" in text


def test_a_sweep_of_which_all_settings_failed_tells_no_seeds_and_tests():
    text = page.render(swept([setting(0, {"a": "1"}, [], "The loss is nan.")]))
    assert "1 setting (grid). No training succeeded." in text
    assert "tested over" not in text


@pytest.fixture
def opened(browser, tmp_path):
    """The page in the browser, and an expression for the colour of its ground."""
    path = tmp_path / "sweep.html"
    path.write_text(page.render(result("optimizer.lr", "network.dim")), encoding="utf-8")
    browser.media(prefers_color_scheme="light")
    browser.open(path, ready="document.readyState === 'complete'")
    yield browser, "getComputedStyle(document.body).backgroundColor"
    browser.js("localStorage.clear()")


def test_the_theme_follows_the_system_until_the_button_is_used(opened):
    browser, ground = opened
    light = browser.js(ground)
    browser.media(prefers_color_scheme="dark")
    dark = browser.js(ground)
    assert light != dark
    browser.click("#theme")
    assert browser.js(ground) == light
    browser.call("Page.reload")
    browser.wait("document.readyState === 'complete'")
    assert browser.js(ground) == light
    assert browser.errors == []


def test_the_page_never_scrolls_sideways(opened):
    browser, _ = opened
    for width in (360, 768, 1280):
        browser.size(width)
        browser.settle()
        assert browser.js("document.documentElement.scrollWidth") <= width


def test_paper_is_light_and_shows_no_button(opened):
    browser, ground = opened
    browser.media("print", prefers_color_scheme="dark")
    assert browser.js(ground) == "rgb(255, 255, 255)"
    assert browser.js("getComputedStyle(document.querySelector('#theme')).display") == "none"
