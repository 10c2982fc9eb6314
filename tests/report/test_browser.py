"""The report in a real browser: Chromium without a screen, the page opened from the disk."""

import shutil

import pytest
import report_results

from mmlda import report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
WIDTHS = (1920, 1280, 390)

# Texts whose contrast with what lies behind them is under 4.5 (3 where they are large), as the WCAG count it.
FAINT = """() => {
  const rgb = (c) => c.match(/[\\d.]+/g).map(Number);
  const linear = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = (c) => {
    const [r, g, b] = rgb(c).map((v) => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const c = getComputedStyle(e).backgroundColor;
      if ((rgb(c)[3] ?? 1) === 1) return c;
    }
    throw new Error("no background");
  };
  const faint = []; let seen = 0;
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let n; (n = walk.nextNode());) {
    const e = n.parentElement;
    if (!n.data.trim() || e.closest("script, style, .skip, dialog:not([open])") || !e.checkVisibility()) continue;
    const s = getComputedStyle(e);
    const [a, b] = [light(e.closest("svg") ? s.fill : s.color), light(behind(e))].sort((p, q) => q - p);
    const size = parseFloat(s.fontSize);
    seen += 1;
    const least = size >= 24 || (size >= 18.66 && s.fontWeight >= 700) ? 3 : 4.5;
    if ((a + 0.05) / (b + 0.05) < least) faint.push(n.data.trim() + " " + s.color);
  }
  return { seen, faint: faint.slice(0, 5) };
}"""


@pytest.fixture(scope="module")
def browser():
    sync = pytest.importorskip("playwright.sync_api")
    with sync.sync_playwright() as p:
        chromium = p.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        )
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    report_results.write(folder / "results")
    return report.build(folder / "results", folder / "report.html").as_uri()


@pytest.fixture
def visit(browser):
    """Open a page; at the end: no message on the console, no error, no request but the page itself."""
    contexts, troubles = [], []

    def open_(address, width=1280, **settings):
        context = browser.new_context(viewport={"width": width, "height": 800}, reduced_motion="reduce", **settings)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(5000)
        page.on("console", lambda message: troubles.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: troubles.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (troubles.append("a dialog"), dialog.dismiss()))
        page.on(
            "request",
            lambda request: (
                None
                if request.url == address or request.url.startswith("data:")
                else troubles.append(f"request: {request.url[:80]}")
            ),
        )
        page.goto(address)
        return page

    yield open_
    for context in contexts:
        context.close()
    assert not troubles


@pytest.mark.parametrize("width", WIDTHS)
def test_it_opens_and_never_scrolls_sideways(visit, address, width):
    page = visit(address, width)
    assert "Mahalanobis" in page.title() and page.locator("svg.plot").count() > 20
    inside = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    assert page.evaluate(inside)
    assert page.evaluate("[...document.images].every((image) => image.complete && image.naturalWidth > 0)")
    lines = page.locator("nav a").evaluate_all("links => links.map((a) => a.getClientRects().length)")
    assert lines == [1] * 7, "no word of the navigation is broken"
    ends = [box["x"] + box["width"] for box in (link.bounding_box() for link in page.locator("nav a").all())]
    assert max(ends) <= page.locator("#theme").bounding_box()["x"], "the menu is whole"
    wide = page.locator("#table2-1").evaluate("(t) => t.parentElement.scrollWidth > t.parentElement.clientWidth")
    assert wide == (width == 390), "on a phone a table scrolls in its own box; on a desk it fits"
    hints = page.locator(".hint")
    assert hints.count() == page.locator(".scroll").count()
    assert page.locator("article:has(#table2-1) .hint").is_visible() == wide, "and says so"
    page.locator("#table2-1 .num").first.click()
    assert page.evaluate(inside), "nor with the provenance open"


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
def test_the_curve_and_table_2_are_on_the_first_two_screens(visit, address, width, height):
    page = visit(address, width)
    curve, glance = page.locator(".hero .plot").first.bounding_box(), page.locator("#table2-drawn").bounding_box()
    assert curve["y"] + curve["height"] < height * (1 if width == 1280 else 1.2)
    assert glance["y"] < 2 * height
    if width == 1280:
        assert glance["y"] + glance["height"] < 2 * height
        assert curve["x"] + curve["width"] > 0.6 * width, "beside the headline"


def test_audits_open_when_asked_for(visit, address):
    page = visit(address)
    evidence = page.locator(".evidence").first
    assert not evidence.is_visible()
    page.locator("#audit summary").first.press("Enter")
    assert evidence.is_visible()


def column(page, table, k):
    return page.locator(f"#{table} tbody tr td:nth-child({k + 1})").evaluate_all(
        "cells => cells.map(c => c.dataset.sort ?? null)"
    )


def test_tables_sort_as_numbers_both_ways_with_missing_values_last(visit, address):
    page = visit(address)
    head = page.locator("#table2-1 thead tr:last-child th")
    labels = [label.strip() for label in head.all_inner_texts()]
    k = labels.index("diff.")
    before = [float(v) for v in column(page, "table2-1", k)]
    head.nth(k).locator("button").click()
    assert [float(v) for v in column(page, "table2-1", k)] == sorted(before) != before
    assert head.nth(k).get_attribute("aria-sort") == "ascending"
    head.nth(k).locator("button").focus()
    page.keyboard.press("Enter")
    assert [float(v) for v in column(page, "table2-1", k)] == sorted(before, reverse=True)
    assert head.nth(k).get_attribute("aria-sort") == "descending"
    last = len(labels) - 1  # JSMA's difference: not there for two of the networks
    for order in (False, True):
        head.nth(last).locator("button").press("Space")
        values = column(page, "table2-1", last)
        there = [float(v) for v in values if v is not None]
        assert values[len(there) :] == [None] * 6 and there == sorted(there, reverse=order)
    assert page.locator("#table2-1 [aria-sort]").count() == 1
    head.nth(0).locator("button").click()
    names = page.locator("#table2-1 tbody td:first-child").all_inner_texts()
    assert list(dict.fromkeys(names)) == ["SR", "SR + SAT", "SR + HAT", "MM-LDA"], "networks in the paper's order"


def test_the_gallery_switches_by_click_and_by_key(visit, address):
    page = visit(address)
    tabs, panels = page.get_by_role("tab"), page.locator(".panel")

    def shown():
        return [k for k in range(panels.count()) if panels.nth(k).is_visible()]

    assert tabs.count() == 4 and shown() == [0]
    tabs.nth(2).click()
    assert shown() == [2] and tabs.nth(2).get_attribute("aria-selected") == "true"
    for key, then in (("ArrowRight", 3), ("ArrowRight", 0), ("ArrowLeft", 3), ("Home", 0), ("End", 3)):
        page.keyboard.press(key)
        assert shown() == [then] and tabs.nth(then).evaluate("tab => tab === document.activeElement")
    assert [t.get_attribute("tabindex") for t in tabs.all()] == ["-1", "-1", "-1", "0"]
    noise = panels.nth(3).locator(".noise").first
    gain = int(panels.nth(3).get_attribute("data-gain"))
    assert (
        noise.evaluate("i => getComputedStyle(i).filter") == "none"
        and panels.nth(3).get_by_text("amplified").is_visible()
    )
    page.get_by_role("button", name="Amplify the noise").press("Enter")
    assert noise.evaluate("i => getComputedStyle(i).filter") == f"contrast({1 / gain:g})"
    assert not panels.nth(3).get_by_text("amplified").is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_themes_are_readable_and_can_be_switched(visit, address, scheme):
    page = visit(address, color_scheme=scheme)

    def background():
        return page.evaluate("getComputedStyle(document.documentElement).backgroundColor")

    first = background()
    assert (sum(map(int, first[4:-1].split(","))) < 200) == (scheme == "dark"), first
    for _ in range(2):
        found = page.evaluate(FAINT)
        assert found["seen"] > 500 and not found["faint"]
        page.get_by_role("button", name="theme").press("Enter")
    assert background() == first
    page.get_by_role("button", name="theme").click()
    chosen = background()
    assert chosen != first
    page.reload()
    assert background() == chosen, "remembered"


def test_provenance_opens_and_closes_from_the_keyboard(visit, address):
    page = visit(address)
    dialog = page.locator("dialog")
    number = page.locator("#table2-1 .num").nth(3)
    assert not dialog.is_visible()
    number.focus()
    page.keyboard.press("Enter")
    assert dialog.is_visible()
    shown = dialog.inner_text()
    for word in (
        "a1b2c3d4e5f6",
        "NVIDIA H200",
        "torch 2.13.0",
        "9c9c9c",
        "The first 500 test images.",
        "optimizer",
        "cross-entropy",
        "12.5",
    ):
        assert word in shown, word
    page.keyboard.press("Escape")
    assert not dialog.is_visible() and number.evaluate("n => n === document.activeElement")
    page.keyboard.press("Space")
    dialog.get_by_role("button", name="Close").press("Enter")
    assert not dialog.is_visible()
    page.locator("#table1 .num").first.click()  # three runs behind one number
    assert dialog.locator("details").count() == 3
    dialog.locator("summary").nth(1).press("Enter")
    assert "seed" in dialog.locator("details").nth(1).locator("dl").inner_text()
    page.mouse.click(5, 400)
    assert not dialog.is_visible(), "a click beside it"


def test_focus_can_be_seen(visit, address):
    page = visit(address)
    page.keyboard.press("Tab")
    assert page.locator(".skip").evaluate("a => a === document.activeElement && a.getBoundingClientRect().left >= 0")
    page.keyboard.press("Tab")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_in_print_everything_is_there_on_white(visit, address):
    page = visit(address, color_scheme="dark")
    page.emulate_media(media="print")
    assert page.locator(".panel:visible").count() == 4 and not page.locator("nav.bar").is_visible()
    assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.evaluate(FAINT)["faint"]


def test_markup_in_results_does_not_run(visit, tmp_path):
    made = report.build(
        report_results.write_evil(tmp_path / "results"), tmp_path / "evil.html", title=report_results.EVIL
    )
    page = visit(made.as_uri(), 375)
    page.locator("#table2-0 .num").first.click()
    assert "onerror" in page.locator("dialog").inner_text(), "shown as text"
    assert page.evaluate("window.hacked === undefined && document.querySelectorAll('script').length === 2")
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
