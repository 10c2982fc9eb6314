"""A small reproduction on digits that the tests of the paper's parts share."""

import pytest

from mmlda import paper
from mmlda.paper import Setup
from mmlda.paper.rows import HAT, SAT

CELLS = [(SAT, "BIM", 0.12), (HAT, "BIM", 0.12)]


@pytest.fixture(scope="session")
def setup(tmp_path_factory):
    return Setup(data="digits", out=tmp_path_factory.mktemp("paper"), steps=60, n=24, show=False)


@pytest.fixture(scope="session")
def make_table2():
    """Table 2 in small: two attacks, one perturbation, two fine-tuned networks."""
    return lambda setup: paper.table2(setup, kinds=("BIM", "JSMA"), eps=(0.12,), cells=CELLS)


@pytest.fixture(scope="session")
def table2(setup, make_table2):
    return make_table2(setup)


@pytest.fixture(scope="session")
def bim_on_sr(table2):
    """One result of Table 2: BIM on SR."""
    return next(r for r in table2 if r.attack == "BIM" and r.recipe == "digits-sr")
