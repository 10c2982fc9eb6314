"""What a recipe takes for a number of steps, and what it refuses."""

import numpy as np
import pytest

from mmlda.recipes import Adversary, Recipe


@pytest.mark.parametrize(
    "change",
    [{"steps": 3.5}, {"steps": "3"}, {"batch_size": 2.5}, {"accumulate": 1.5}, {"accumulate": 0}, {"warmup": 0.5},
     {"warmup": -1}, {"pad": 1.5}, {"seed": 1.5}, {"seed": -1}, {"momentum": 1.5}, {"momentum": 1.0},
     {"momentum": -0.1},
     {"momentum": float("nan")}, {"milestones": (-1,)}, {"milestones": (1.5,)}],
)  # fmt: skip
def test_what_is_no_number_of_its_kind_is_named(change):
    ((name, value),) = change.items()
    wrong = value[0] if isinstance(value, tuple) else value
    with pytest.raises(ValueError, match=f"^{name} = {wrong!r}: expected"):
        Recipe(**{"steps": 10, **change})


def test_steps_of_an_adversary_are_whole():
    with pytest.raises(ValueError, match=r"steps = 2\.5: expected a whole number, at least 1"):
        Adversary(attack="pgd", eps=0.1, steps=2.5)


def test_the_ends_of_the_ranges_are_taken():
    recipe = Recipe(steps=np.int64(1), batch_size=1, momentum=0, milestones=(0,), warmup=0, pad=0)
    assert recipe.rate(0) == pytest.approx(recipe.lr * recipe.gamma)
