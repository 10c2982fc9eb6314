"""Tables: scaled by their bounds, trained on, attacked and evaluated like images."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_breast_cancer, load_iris
from torch.utils.data import DataLoader

import mmlda
from mmlda.attacks import APGD, BIM, FGSM, PGD, CarliniWagner
from mmlda.data import as_images, split, table


def test_columns_are_scaled_by_their_bounds():
    x = np.array([[0.0, -5.0], [10.0, 5.0], [5.0, 0.0]])
    data = table(x, ["b", "a", "b"], name="mine")
    assert data.is_table and data.shape == (2,) and data.classes == ("a", "b") and data.labels.tolist() == [1, 0, 1]
    assert data.images.tolist() == [[0, 0], [1, 1], [0.5, 0.5]] and data.in_units(data.images).tolist() == x.tolist()
    assert repr(data) == "ImageData('mine', 3 rows of 2, 2 classes)"
    wide = table(x, [0, 1, 0], bounds=([0, -10], [20, 10]))
    assert wide.images.tolist() == [[0, 0.25], [0.5, 0.75], [0.25, 0.5]]
    again = table(x[:1], [0], bounds=data.bounds)
    assert again.images.tolist() == [[0, 0]]
    assert table([[1.0, 2.0], [1.0, 3.0]], [0, 1]).images.tolist() == [[0, 0], [0, 1]]  # a constant column


@pytest.mark.parametrize(
    "x, bounds, words",
    [
        ([[1.0, 2.0]], ([0, 0, 0], 1), r"bounds must be \(low, high\), each a number or \[2\], got"),
        ([[1.0, 2.0]], 3, r"bounds must be \(low, high\), each a number or \[2\], got 3"),
        ([[1.0, 2.0]], (1, 1), "bounds must be .* with low < high"),
        ([[1.0, float("nan")]], None, r"x must be finite numbers \[N, D\]"),
        ([1.0, 2.0], None, r"x must be finite numbers \[N, D\], got shape \[2\]"),
        ([["a"]], None, r"x must be an array \[N, D\] of numbers, got a list"),
    ],
)
def test_refused(x, bounds, words):
    with pytest.raises(ValueError, match=words):
        table(x, [0], bounds=bounds)


def test_values_outside_the_bounds_are_clipped_with_one_warning():
    words = "1 of 4 values, 0.5 to 2 for 0 to 1 in column 1, are outside the table's bounds and clipped to them"
    with pytest.warns(UserWarning, match=words) as caught:
        data = table([[0.0, 2.0], [1.0, 0.5]], [0, 1], bounds=(0, 1))
    assert len(caught) == 1 and data.images.tolist() == [[0, 1], [1, 0.5]]


def test_an_unscaled_table_is_pointed_to_the_function_that_scales_it():
    with pytest.raises(ValueError, match=r"x must be in \[0, 1\], got values from 0 to 7 .*mmlda.data.table"):
        as_images((torch.arange(8.0).view(4, 2), torch.arange(4)))


@pytest.mark.parametrize("load, classes", [(load_iris, 3), (load_breast_cancer, 2)])
@pytest.mark.parametrize("head", ["mmlda", "softmax"])
def test_fit_attack_evaluate(load, classes, head, tmp_path):
    x, y = load(return_X_y=True)
    train, test = split(table(x, y, name="rows"))
    config = {"backbone": "mlp", "inputs": x.shape[1], "head": head, "num_classes": classes}
    model = mmlda.models.build(config, seed=0)
    mmlda.fit(model, train, mmlda.Recipe(steps=300, optimizer="adam", lr=3e-3, batch_size=32), show=False, out=tmp_path)
    assert mmlda.accuracy(model, test).accuracy > 0.9
    assert mmlda.accuracy(mmlda.load(str(tmp_path)), test).accuracy == mmlda.accuracy(model, test).accuracy
    attacks = [FGSM(eps=0.1), BIM(eps=0.1), PGD(eps=0.1), APGD(eps=0.1, steps=5), CarliniWagner(steps=20)]
    found = mmlda.evaluate(model, test, attacks, n=20, show=False)
    assert found.clean.n == 20 and all(result.number < found.clean.number for result in found.attacks[1:3])
    moved = PGD(eps=0.2)(model, test.pixels(), test.labels).x_adv
    low, high = test.bounds
    units = test.in_units(moved)
    assert (units >= low).all() and (units <= high).all()  # within each column's bounds
    reach = 0.2 * (high - low) + 1e-4 * (high - low)
    assert ((units - test.in_units(test.pixels())).abs() <= reach).all()


def test_adversarial_training_and_cross_validation_of_tables():
    x, y = load_iris(return_X_y=True)
    data = table(x, y)
    recipe = mmlda.Recipe(
        steps=40, optimizer="adam", lr=3e-3, batch_size=32, adversary=mmlda.Adversary(attack="pgd", eps=0.05)
    )
    model = mmlda.models.build({"backbone": "mlp", "inputs": 4, "num_classes": 3}, seed=0)
    assert mmlda.fit(model, data, recipe, show=False).step == 40
    plain = mmlda.Recipe(steps=60, optimizer="adam", lr=3e-3)
    assert mmlda.cross_validate(data, plain, [10.0], folds=2, show=False)[0]["mean"] < 0.5
    for source in (data, DataLoader(data, batch_size=32)):
        with pytest.raises(ValueError, match="pad and flip must be 0 and False for a table"):
            mmlda.fit(model, source, mmlda.Recipe(steps=1, pad=2), show=False)
