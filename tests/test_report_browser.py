"""The page as a reader meets it: opened from disk in headless Chromium, wide, narrow, on paper, without scripts."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reports import html, write
from specbench.summarise import summary
from tests.demo_summary import demo, many
from tests.make_run import FOUR, default_prompts, make_run

webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium, from the dev extra")

pytestmark = pytest.mark.browser

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
)  # fmt: skip
FIGURES = {"figure-speedup", "figure-groups", "figure-acceptance", "figure-latency"}

VISIBLE_FIGURES = """
return [...document.querySelectorAll('figure')].filter(figure =>
  [...figure.querySelectorAll('svg')].filter(svg => {
    const box = svg.getBoundingClientRect(); return box.width > 200 && box.height > 80;
  }).length === 1).map(figure => figure.id);
"""
OVERLAPS = """
const found = [];
for (const svg of document.querySelectorAll('figure svg')) {
  const frame = svg.getBoundingClientRect();
  if (!frame.width) continue;
  const boxes = [...svg.querySelectorAll('text')].map(t => [t.textContent, t.getBoundingClientRect()]);
  for (const [text, a] of boxes) {
    if (a.left < frame.left - 1 || a.right > frame.right + 1) found.push('outside: ' + text);
    for (const [other, b] of boxes)
      if (a !== b && a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 4 && b.top < a.bottom - 4)
        found.push(text + ' over ' + other);
  }
}
return found;
"""


def start(profile: Path, *, scripts: bool = True) -> Any:
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("needs a browser: install the Debian packages chromium and chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    if not scripts:
        options.add_experimental_option("prefs", {"profile.managed_default_content_settings.javascript": 2})
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=driver))


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    browser = start(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Addresses of a usual report and of one with a dozen arms of long names."""
    folder = tmp_path_factory.mktemp("pages")
    crowded = folder / "crowded.html"
    crowded.write_text(html.render(many(12)))
    return {"usual": write(demo(), folder / "demo")["html"].as_uri(), "crowded": crowded.as_uri()}


def look(browser: Any, address: str, width: int, *, media: str = "", scheme: str = "light") -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(address)


def verdict(browser: Any) -> str:
    element = browser.find_element("id", "verdict")
    assert element.is_displayed()
    assert element.size["height"] > 40
    return str(element.text).replace("\u00a0", " ")


def requests(browser: Any) -> set[str]:
    """Every address that the page made the browser ask for since the last call."""
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
    return {url for url in sent if not url.startswith("data:")}


@pytest.mark.parametrize("width", [360, 390, 1280])
@pytest.mark.parametrize("name", ["usual", "crowded"])
def test_readable_at_every_width(chromium: Any, pages: dict[str, str], name: str, width: int) -> None:
    look(chromium, pages[name], width)
    assert demo().verdict in verdict(chromium)
    assert set(chromium.execute_script(VISIBLE_FIGURES)) == FIGURES
    page, shown = chromium.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    assert page <= shown == width
    chromium.execute_script("document.querySelectorAll('details').forEach(box => box.open = true)")
    assert chromium.execute_script("return document.documentElement.scrollWidth") <= width
    assert chromium.execute_script(OVERLAPS) == []


@pytest.mark.parametrize("width", [360, 1280])
def test_engines_side_by_side_at_every_width(chromium: Any, tmp_path: Path, width: int) -> None:
    run = make_run(
        tmp_path / "run", methods=("none", "ngram-simple", "draft-simple"), blocks=3, engines=FOUR, prompts=default_prompts(1)
    )  # fmt: skip
    look(chromium, write(summary(run), run)["html"].as_uri(), width)
    assert set(chromium.execute_script(VISIBLE_FIGURES)) == FIGURES | {"figure-engines"}
    assert chromium.execute_script("return document.documentElement.scrollWidth") <= width
    assert chromium.execute_script(OVERLAPS) == []


def test_asks_nothing_and_complains_of_nothing(chromium: Any, pages: dict[str, str]) -> None:
    chromium.get_log("browser")
    requests(chromium)
    look(chromium, pages["usual"], 1280)
    assert requests(chromium) == {pages["usual"]}
    assert chromium.get_log("browser") == []


@pytest.mark.parametrize(("media", "scheme"), [("", "light"), ("", "dark"), ("print", "dark")])
def test_text_and_figures_stand_out_from_the_page(
    chromium: Any, pages: dict[str, str], media: str, scheme: str
) -> None:
    look(chromium, pages["usual"], 1280, media=media, scheme=scheme)
    assert demo().verdict in verdict(chromium)
    assert set(chromium.execute_script(VISIBLE_FIGURES)) == FIGURES
    paper = luminance(chromium.execute_script("return getComputedStyle(document.body).backgroundColor"))
    assert (paper < 0.5) == (scheme == "dark" and media != "print")
    colours = chromium.execute_script(
        "return [getComputedStyle(document.querySelector('.lead')).color, ...[...document.querySelectorAll("
        "'figure .wide text')].map(text => getComputedStyle(text).fill)]"
    )
    assert len(colours) > 40
    # 4.5 is the contrast that WCAG 2.1 (1.4.3, level AA) asks of text.
    assert min(contrast(luminance(colour), paper) for colour in set(colours)) >= 4.5


def luminance(colour: str) -> float:
    """Relative luminance of `rgb(r, g, b)`, as WCAG 2.1 defines it."""
    parts = [int(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: float, other: float) -> float:
    return (max(one, other) + 0.05) / (min(one, other) + 0.05)


def test_the_data_download_without_a_network(chromium: Any, pages: dict[str, str], tmp_path: Path) -> None:
    chromium.execute_cdp_cmd(
        "Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)}
    )
    look(chromium, pages["usual"], 1280)
    chromium.find_element("id", "download").click()
    saved, deadline = tmp_path / "ngram-on-smollm2.json", time.monotonic() + 20
    while not saved.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    embedded = chromium.execute_script("return document.getElementById('data').textContent")
    assert json.loads(saved.read_text()) == json.loads(embedded)
    assert chromium.get_log("browser") == []


def test_readable_without_scripts(pages: dict[str, str], tmp_path: Path) -> None:
    browser = start(tmp_path / "profile", scripts=False)
    try:
        look(browser, pages["usual"], 1280)
        assert demo().verdict in verdict(browser)
        assert set(browser.execute_script(VISIBLE_FIGURES)) == FIGURES
        assert not browser.find_element("id", "download").is_displayed()
        box = browser.find_element("css selector", "#metrics details")
        before = box.size["height"]
        box.find_element("css selector", "summary").click()
        assert box.size["height"] > before
    finally:
        browser.quit()
