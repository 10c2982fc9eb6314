"""Attacks on tables [N, D] whose features have ranges of their own."""

from functools import partial

import pytest
import torch
from sklearn.datasets import load_breast_cancer, load_iris

from mmlda.attacks import APGD, BIM, FAB, FGSM, ILCM, JSMA, PGD, CarliniWagner, Square, WorstCase


def trained(load):
    """An MLP on standardised features inside, the table as it is outside; the range of each feature."""
    x, y = (torch.as_tensor(part) for part in load(return_X_y=True))
    x = x.float()
    torch.manual_seed(0)
    mean, std = x.mean(0), x.std(0)
    net = torch.nn.Sequential(torch.nn.Linear(x.shape[1], 16), torch.nn.ReLU(), torch.nn.Linear(16, int(y.max()) + 1))
    optimizer = torch.optim.Adam(net.parameters(), 0.05)
    for _ in range(60):
        loss = torch.nn.functional.cross_entropy(net((x - mean) / std), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return lambda v: net((v - mean) / std), x, y, (x.amin(0), x.amax(0))


@pytest.mark.filterwarnings("ignore:.*dlr")
@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("kind", [FGSM, BIM, PGD, APGD, FAB, partial(Square, queries=200), WorstCase])
def test_every_feature_stays_in_its_range_and_accuracy_falls(kind, norm):
    load = load_breast_cancer if kind is PGD else load_iris
    model, x, y, (low, high) = trained(load)
    result = kind(eps=0.9, norm=norm, bounds=(low, high))(model, x, y)
    assert ((result.x_adv >= low) & (result.x_adv <= high)).all()
    near = result.linf if norm == "linf" else result.l2
    assert (near[near < torch.inf] <= 0.9 * (1 + 1e-3)).all()
    assert result.clean_accuracy > 0.95
    assert result.robust_accuracy < result.clean_accuracy - 0.05


@pytest.mark.parametrize(
    "attack",
    [
        partial(ILCM, eps=0.9),
        partial(JSMA, eps=0.5),
        partial(JSMA, eps=-0.5, surface="softmax", target="random"),
        partial(JSMA, eps=2.0, pairs=True),
        partial(CarliniWagner, steps=50, search_steps=3),
        partial(FAB, steps=10, norm="l2"),
    ],
)
def test_attacks_without_a_ball_stay_in_range_too(attack):
    model, x, y, (low, high) = trained(load_iris)
    result = attack(bounds=(low, high))(model, x[::3], y[::3])
    assert ((result.x_adv >= low) & (result.x_adv <= high)).all()
    assert torch.equal(model(result.x_adv).argmax(1), result.prediction)
    assert result.robust_accuracy < result.clean_accuracy - 0.2


@pytest.mark.filterwarnings("ignore:.*dlr")
def test_the_same_range_for_every_feature_is_as_two_numbers():
    model, x, y, _ = trained(load_iris)
    x = x / 10
    ends = torch.zeros(4), torch.ones(4)
    for attack in (PGD, CarliniWagner, WorstCase):
        own = {"steps": 20} if attack is not WorstCase else {}
        eps = {} if attack is CarliniWagner else {"eps": 0.1}
        one = attack(**eps, **own)(lambda v: model(10 * v), x, y)
        each = attack(**eps, **own, bounds=ends)(lambda v: model(10 * v), x, y)
        assert torch.equal(one.x_adv, each.x_adv)
        assert torch.allclose(one.distortion, each.distortion)


@pytest.mark.filterwarnings("ignore:.*dlr")
def test_a_feature_with_an_empty_range_does_not_change():
    model, x, y, (low, high) = trained(load_iris)
    x[:, 2] = low[2] = high[2] = 1.5
    result = WorstCase(eps=0.5, bounds=(low, high))(model, x, y)
    assert (result.x_adv[:, 2] == 1.5).all() and (result.x_adv != x).any() and result.distortion.isfinite().all()
    with pytest.raises(ValueError, match="bounds must be low < high for every feature"):
        CarliniWagner(bounds=(low, high))(model, x, y)


def test_bounds_are_checked():
    model, x, y, (low, high) = trained(load_iris)
    attack = PGD(eps=0.5, bounds=(low, high))
    assert attack == PGD(eps=0.5, bounds=(low.tolist(), high.numpy())) and hash(attack)
    with pytest.raises(ValueError, match=r"bounds must be numbers or of shape \[3\], got \[4\]"):
        attack(model, x[:, :3], y)
    with pytest.raises(ValueError, match=r"outside in features \[1\]"):
        attack(model, torch.where(torch.arange(4) == 1, x + 9, x), y)
    for wrong in ((high, low), (low, high[:3]), (low, 9.0), (low, low)):
        with pytest.raises(ValueError, match="bounds must be"):
            PGD(eps=0.5, bounds=wrong)


def test_eps_is_at_most_the_widest_range():
    low, high = trained(load_iris)[3]
    widest = float((high - low).max())
    PGD(eps=widest, bounds=(low, high))
    with pytest.raises(ValueError, match="eps must be at most"):
        PGD(eps=widest + 0.1, bounds=(low, high))
