"""The page of a sweep: names are escaped, and it needs nothing from elsewhere."""

import re

from tests.trainer.sweep.outcomes import result
from trainer.sweep import page
from trainer.sweep.results import setting


def test_the_page_escapes_names_and_loads_nothing():
    text = page.render(result("optimizer.lr", "network.dim"))
    assert "<b>sweep</b>" not in text
    assert "&lt;b&gt;sweep" in text
    assert not re.search(r"https?://|<script|<link|src=", text)


def test_a_failed_setting_is_on_the_page():
    found = result("optimizer.lr")
    found["rows"].append(setting(9, {"optimizer.lr": "1e9"}, [], "The loss is nan."))
    assert "The loss is nan." in page.render(found)
