"""A page with all kinds of results, shared by the tests of the report."""

import pytest
import report_results
from report_page import Tree

from mmlda import report


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """A folder with all kinds of results, and the page."""
    folder = tmp_path_factory.mktemp("report")
    made = report_results.write(folder / "results")
    return folder, made, report.build(folder / "results", folder / "report.html")


@pytest.fixture(scope="session")
def page(built):
    return Tree(built[2].read_text(encoding="utf-8"))
