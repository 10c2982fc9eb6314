"""Results that may say nothing about robustness: random models, blind attacks, models without a gradient."""

import sys
import warnings

import pytest
import torch
from attack_cases import ATTACKS, every_attack

from mmlda.attacks import BIM, FAB, PGD, AttackWarning, CarliniWagner, Square, WorstCase
from mmlda.attacks.progress import Bar


@pytest.fixture
def linear():
    """A linear model in float64 and 60 images that it gets right, rounded to eighths or not."""
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(5, 16, generator=g, dtype=torch.float64)
    x = torch.randint(9, (60, 1, 4, 4), generator=g).double() / 8

    def model(v):
        return 3 * (v.flatten(1) - 0.5) @ weight.T

    return model, x, model(x).argmax(1)


def noisy(model):
    return lambda v: model(v + 0.1 * torch.randn_like(v))


def rounded(model):
    return lambda v: model((v * 8).round() / 8)


@pytest.mark.parametrize("attack", [WorstCase(eps=0.0), PGD(eps=0.0), Square(eps=0.0, queries=50)], ids=type)
def test_lucky_draws_of_a_random_model_are_not_counted(linear, attack):
    model, x, y = linear
    torch.manual_seed(0)
    with pytest.warns(AttackWarning, match="the model is random"):
        result = attack(noisy(model), x, y)
    assert result.clean_accuracy > 0.9
    assert abs(result.robust_accuracy - result.clean_accuracy) < 0.1
    assert "random" in result.notes[0] and "16 passes" in repr(result)


def test_the_list_goes_on_after_a_lucky_draw(linear):
    """An image that only one pass got wrong is left to the next attack, which breaks it."""
    model, x, y = linear
    torch.manual_seed(0)
    with pytest.warns(AttackWarning, match="random"):
        result = WorstCase(eps=0.3, attacks=[Square(eps=0.0, queries=50), BIM(eps=0.3)])(noisy(model), x, y)
    assert (result.winner == 1).double().mean() > 0.5
    assert torch.equal(result.winner != -1, result.success)


@pytest.mark.parametrize("attack", [FAB(steps=5), CarliniWagner(steps=20)], ids=type)
def test_a_lucky_draw_of_a_minimum_norm_attack_has_an_infinite_distance(linear, attack):
    model, x, y = linear
    torch.manual_seed(0)
    with pytest.warns(AttackWarning, match="random"):
        result = attack(noisy(model), x, y)
    assert not result.success.all()
    assert torch.equal(result.l2.isinf(), ~result.success)
    assert torch.equal(result.x_adv[~result.success], x[~result.success])


@every_attack
def test_a_deterministic_model_gives_no_warning_and_a_short_summary(linear, name):
    model, x, y = linear
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = ATTACKS[name]()(model, x, y)
    assert result.notes == () and result.classes == 5
    assert repr(result).startswith("AttackResult: 60 images, 5 classes\n") and len(repr(result).splitlines()) <= 7


def test_two_passes_are_compared_once_on_a_few_images(linear):
    model, x, y = linear
    sizes = []

    def seen(v):
        sizes.append(len(v))
        return model(v)

    PGD(eps=0.1, steps=2, batch_size=30)(seen, x, y)
    assert sizes.count(16) == 2 and set(sizes) == {30, 16}


@pytest.mark.parametrize("attack", [PGD(eps=0.1), BIM(eps=0.1, batch_size=7), FAB()], ids=type)
def test_a_blind_attack_warns_once(linear, attack):
    model, x, y = linear
    with pytest.warns(AttackWarning, match="exactly zero for") as caught:
        result = attack(rounded(model), x, y)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert result.zero_gradient == 1.0 and result.notes == (str(caught[0].message),)


def test_a_list_is_blind_only_where_all_its_attacks_are(linear):
    model, x, y = linear
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = WorstCase(eps=0.1)(rounded(model), x, y)  # Square needs no gradient
    assert result.zero_gradient == 1.0 and result.blind_share == 0.0
    with pytest.warns(AttackWarning, match="exactly zero"):
        WorstCase(eps=0.1, attacks=[BIM(eps=0.1), PGD(eps=0.1)])(rounded(model), x, y)


@pytest.mark.parametrize("how", ["detached", "numpy"])
def test_the_black_box_part_runs_on_a_model_without_a_gradient(linear, how):
    model, x, y = linear

    def opaque(v):
        return model(v).detach() if how == "detached" else model(torch.from_numpy(v.numpy()))

    with pytest.warns(AttackWarning, match="no gradient") as caught:
        result = WorstCase(eps=0.3)(opaque, x, y)
    assert len(caught) == 1 and result.robust_accuracy < 0.9
    assert set(result.winner.tolist()) <= {-1, 4}
    with pytest.raises(ValueError, match="differentiable"):
        PGD(eps=0.3)(opaque, x, y)
    with pytest.raises(ValueError, match="differentiable"):
        WorstCase(eps=0.3, attacks=[PGD(eps=0.3)])(opaque, x, y)


def test_progress_is_shown_on_request(linear, monkeypatch, capsys):
    model, x, y = linear
    monkeypatch.setattr("mmlda.attacks.progress._PATIENCE", 0.0)
    PGD(eps=0.1)(model, x, y)
    assert capsys.readouterr().err == ""  # no terminal
    PGD(eps=0.1)(model, x, y, show=True)
    assert capsys.readouterr().err.startswith("PGD [")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    WorstCase(eps=0.1, attacks=[PGD(eps=0.1)])(model, x, y)
    assert "\rWorstCase [" in capsys.readouterr().err
    PGD(eps=0.1)(model, x, y, show=False)
    assert capsys.readouterr().err == ""


def test_progress_ends_at_the_total_whatever_the_batches(linear, monkeypatch):
    model, x, y = linear
    bars = []

    class Watched(Bar):
        def __init__(self, *settings):
            super().__init__(*settings)
            bars.append(self)

    monkeypatch.setattr("mmlda.attacks.base.Bar", Watched)
    for attack in (
        PGD(eps=0.1, batch_size=7),
        WorstCase(eps=0.1, attacks=[PGD(eps=0.1), FAB(steps=3, batch_size=9)], batch_size=25),
    ):
        attack(model, x, y)
        assert bars[-1].done == pytest.approx(bars[-1].total)
