"""The page of `holdfast bench --html` in a real Chromium: a real run's, from the disk, as people open it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import Chromium, program
from fake_completions import FakeSettings, running_fake

from holdfast.cli.main import main

pytestmark = pytest.mark.skipif(
    program() is None, reason="Chromium is not installed (Debian: apt-get install chromium)"
)
DRAWN = "[...document.querySelectorAll('svg')].filter((one) => one.getBoundingClientRect().height > 50).length"
COLOUR = "getComputedStyle(document.body).backgroundColor"
WIDE = "document.documentElement.scrollWidth <= window.innerWidth"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("chromium")) as found:
        yield found


def test_a_report_opens_without_a_network_in_both_colours_and_at_the_width_of_a_phone(
    browser: Chromium, tmp_path: Path
) -> None:
    report = tmp_path / "report.html"
    with running_fake(FakeSettings()) as fake:
        words = ["--concurrency", "4", "--up", "0.5s", "--peak", "3s", "--down", "0.5s", "--quiet"]
        words += ["--slo", "ttft.p50=5s"]
        assert main(["bench", fake.url, *words, "--html", str(report)]) == 0
    page = browser.open(report.as_uri())
    page.wait(f"{DRAWN} >= 4")
    text = page.text()
    assert "PASS" in text.upper()
    assert "ttft" in text.casefold()
    assert page.run("document.querySelectorAll('script').length") == 0
    loaded = page.run("performance.getEntriesByType('resource').map((one) => one.name)")
    assert [name for name in loaded if not str(name).startswith("data:")] == []
    assert page.problems() == []
    folder = os.environ.get("HOLDFAST_SCREENSHOTS")
    if folder:
        page.screenshot(Path(folder) / "bench-report.png")
    dark = browser.open(report.as_uri(), dark=True)
    dark.wait(f"{DRAWN} >= 4")
    assert dark.run(COLOUR) != page.run(COLOUR)
    phone = browser.open(report.as_uri(), width=390, height=844, phone=True)
    phone.wait(f"{DRAWN} >= 4")
    assert phone.run(WIDE)
