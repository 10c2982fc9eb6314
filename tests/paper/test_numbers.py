"""The paper's numbers, as shares."""

import pytest

from mmlda.paper import numbers
from mmlda.paper.rows import HAT, MMLDA, SAT, SR


def test_numbers_are_those_of_the_paper():
    assert numbers.TABLE1["cifar10", MMLDA] == 0.0804 and numbers.TABLE3["mnist", MMLDA] == 16.32
    assert numbers.table2("mnist", SR, "ILCM", 0.12) == 0.209
    assert numbers.table2("cifar10", SAT, "FGSM", 0.20) == 0.917
    assert numbers.table2("cifar10", MMLDA, "JSMA", 0.20) == 0.918
    assert numbers.table2("mnist", HAT, "BIM", 0.04) == 0.963
    cells = [value for rows in numbers.TABLE2.values() for row in rows for value in row]
    assert len(cells) == 108 and cells.count(None) == 12  # 96, and 12 that stand twice
    assert all(0 <= value <= 1 for value in cells if value is not None)


@pytest.mark.parametrize(
    "kind, data, ours, paper, near",
    [
        ("table1", "cifar10", 0.0763, 0.0713, True),  # exactly half a point
        ("table1", "cifar10", 0.0764, 0.0713, False),
        ("table2", "mnist", 0.829, 0.879, True),
        ("table2", "mnist", 0.828, 0.879, False),
        ("table3", "mnist", 8.56 * 1.19, 8.56, True),
        ("table3", "mnist", 8.56 * 1.21, 8.56, False),
        ("table2", "mnist", 0.5, None, None),
    ],
)
def test_a_number_is_reproduced_if_it_is_near_enough(kind, data, ours, paper, near):
    assert numbers.reproduced(kind, data, ours, paper)[0] is near
