"""The documentation site in a real browser: built as `make docs` does, served on this machine."""

import functools
import http.server
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site; warnings are errors."""
    for module in ("sphinx", "furo", "myst_parser", "sphinx_copybutton", "sphinx_design"):
        pytest.importorskip(module, reason="the extra mmlda[docs] is not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-W", "--keep-going", "-q"]
    command += ["-d", str(folder / "doctrees"), str(ROOT / "docs"), str(folder / "html")]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder / "html"


@pytest.fixture(scope="module")
def address(site):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def browser():
    sync = pytest.importorskip("playwright.sync_api")
    with sync.sync_playwright() as play:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        chromium = play.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield chromium
        chromium.close()


@pytest.fixture
def view(browser, address):
    """Open a tab; at the end: no warning or error on the console, and no request that failed or left the site."""
    contexts, troubles = [], []

    def open_(path="index.html", width=1280, **settings):
        context = browser.new_context(viewport={"width": width, "height": 900}, reduced_motion="reduce", **settings)
        contexts.append(context)
        tab = context.new_page()
        tab.set_default_timeout(10_000)
        tab.on(
            "console",
            lambda message: message.type in ("log", "info", "debug") or troubles.append(f"{tab.url}: {message.text}"),
        )
        tab.on("pageerror", lambda error: troubles.append(f"{tab.url}: error: {error}"))
        # Leaving a page aborts what it was still loading, such as its icon: that is no failure.
        tab.on(
            "requestfailed",
            lambda request: (
                request.failure == "net::ERR_ABORTED" or troubles.append(f"{tab.url}: failed: {request.url}")
            ),
        )
        tab.on(
            "response",
            lambda answer: answer.ok or answer.status == 304 or troubles.append(f"{answer.url}: {answer.status}"),
        )
        tab.on("request", lambda request: request.url.startswith((address, "data:")) or troubles.append(request.url))
        tab.goto(address + path)
        return tab

    yield open_
    for context in contexts:
        context.close()
    assert not troubles


def background(tab):
    """The sum of the red, green and blue of the page's background."""
    colour = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    return sum(map(int, colour.removeprefix("rgb(").removesuffix(")").split(",")))


def test_every_page_opens_and_fits_a_phone_and_a_desktop(view, site, address):
    pages = sorted(str(path.relative_to(site)) for path in site.rglob("*.html") if "_modules" not in path.parts)
    assert len(pages) > 30
    tab = view()
    for page in pages:
        tab.goto(address + page)
        assert tab.locator("h1").count() == 1 or page == "search.html", page
        assert tab.evaluate("[...document.images].every((i) => i.loading == 'lazy' || i.naturalWidth > 0)"), page
        for width in (390, 1024, 1320):
            tab.set_viewport_size({"width": width, "height": 900})
            assert tab.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"), page


def test_the_search_finds_the_head(view):
    tab = view()
    tab.get_by_placeholder("Search").first.fill("MaxMahalanobisHead")
    tab.keyboard.press("Enter")
    results = tab.locator("#search-results li a")
    results.first.wait_for()
    assert any("reference/models.html" in link for link in results.evaluate_all("links => links.map((a) => a.href)"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_theme_follows_the_system_and_can_be_switched(view, scheme):
    tab = view("head.html", color_scheme=scheme)
    assert (background(tab) < 200) == (scheme == "dark")
    shades = set()
    for _ in range(3):  # automatic, light, dark
        tab.locator(".theme-toggle:visible").first.click()
        shades.add(background(tab) < 200)
    assert shades == {True, False}


def test_the_menu_opens_on_a_phone(view):
    tab = view("head.html", width=390)
    link = tab.locator(".sidebar-tree a", has_text="Read an audit")
    assert not link.is_visible() or link.bounding_box()["x"] < 0
    tab.locator("label.nav-overlay-icon").click()
    link.click()
    tab.wait_for_url("**/how-to/read-an-audit.html")


def test_copying_a_command_leaves_out_its_prompt(view, address):
    tab = view("getting-started.html", permissions=["clipboard-read", "clipboard-write"])
    block = tab.locator(".highlight-console").first
    block.hover()
    block.locator("button.copybtn").click()
    copied = tab.evaluate("navigator.clipboard.readText()")
    assert copied.splitlines()[-2:] == ["pip install .", "mmlda --version"]


def test_the_reference_comes_from_the_docstrings(view):
    tab = view("reference/models.html")
    entry = tab.locator("#mmlda\\.models\\.MaxMahalanobisHead").locator("..")
    assert "num_classes" in entry.inner_text() and ">>>" in entry.inner_text()
    tab = view("reference/command-line.html")
    assert "--deterministic" in tab.locator("#mmlda-train").inner_text()
