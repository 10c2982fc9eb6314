"""Pictures of the demo's report for the README: python tools/make_report_pictures.py demo/report.html

Needs Chromium and the test extra (playwright).
"""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

FIGURES = Path(__file__).parents[1] / "docs" / "figures"


def main(page: Path) -> None:
    with sync_playwright() as play:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
        view = browser.new_page(viewport={"width": 1180, "height": 870})
        view.goto(page.resolve().as_uri())
        view.screenshot(path=FIGURES / "report.png")
        view.set_viewport_size({"width": 1180, "height": 1400})
        view.get_by_role("tab", name="MM-LDA").click()
        view.locator("#gallery [role=tabpanel]:visible").screenshot(path=FIGURES / "gallery.png")
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
