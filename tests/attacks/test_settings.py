"""Bad settings are refused by name, and warnings are told where the attack was called."""

import inspect
import math
import re
import warnings

import foolbox
import pytest
import torch
from torch import nn

from mmlda.attacks import APGD, BIM, FAB, FGSM, ILCM, JSMA, PGD, CarliniWagner, Square, WorstCase
from mmlda.attacks.adapters import from_foolbox
from mmlda.data import load
from mmlda.evaluation.robustness import attack_images


@pytest.mark.parametrize(
    "make",
    [
        lambda: JSMA(eps="0.1"),
        lambda: JSMA(eps=0.1, max_share="a"),
        lambda: CarliniWagner(kappa="x"),
        lambda: CarliniWagner(rate=None),
        lambda: CarliniWagner(kappa=1e300),
        lambda: PGD(eps=0.1, step_size="x"),
        lambda: PGD(eps=0.1, step_size=math.inf),
        lambda: PGD(eps=1e39),
        lambda: Square(eps=0.1, p="a"),
        lambda: PGD(eps=0.1, bounds=None),
        lambda: PGD(eps=0.1, bounds=("a", "b")),
        lambda: PGD(eps=0.1, bounds=(0, 1, 2)),
        lambda: WorstCase(eps=0.1, losses=None),
        lambda: WorstCase(eps=0.1, attacks=PGD(eps=0.1)),
        lambda: WorstCase(eps=0.1, attacks=["pgd"]),
        lambda: WorstCase(eps=0.1, attacks=[PGD]),
    ],
)
def test_a_setting_that_is_none_is_refused_by_name(make):
    names = "eps|max_share|kappa|rate|step_size|p|bounds|losses|attacks"
    with pytest.raises(ValueError, match=rf"^({names}) must be .*, got"):
        make()


def test_a_list_of_bounds_is_as_good_as_a_tuple_and_images_need_pixels():
    attack = PGD(eps=0.1, bounds=[0.0, 1.0])
    assert attack == PGD(eps=0.1, bounds=(0.0, 1.0)) and hash(attack) == hash(PGD(eps=0.1))
    with pytest.raises(ValueError, match=r"x must be images with pixels, got a float32 tensor \[4, 0\]"):
        attack(lambda v: v.sum(1, keepdim=True).expand(-1, 2), torch.zeros(4, 0), torch.zeros(4, dtype=torch.int64))


def test_each_place_is_warned_of_a_model_in_train_mode():
    def one(model):
        PGD(eps=0.1, steps=1)(model, torch.rand(2, 4), torch.tensor([0, 1]))

    def other(model):
        PGD(eps=0.1, steps=1)(model, torch.rand(2, 4), torch.tensor([0, 1]))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for call in (one, other):
            call(nn.Linear(4, 3).train())
    assert [w.filename for w in caught] == [__file__] * 2 and len({w.lineno for w in caught}) == 2


def test_a_foolbox_attack_has_a_radius_or_needs_none():
    x, y = torch.rand(2, 4), torch.tensor([0, 1])
    for eps in (-0.1, "a", [0.1, 0.2]):
        with pytest.raises(ValueError, match=r"eps must be a finite number >= 0, got"):
            from_foolbox(foolbox.attacks.LinfPGD(), eps=eps)
    with pytest.raises(ValueError, match=r"eps must be a number, since LinfProjected.* has a fixed size, got None"):
        from_foolbox(foolbox.attacks.LinfPGD())(nn.Linear(4, 3).eval(), x, y)
    seeded = from_foolbox(foolbox.attacks.LinfPGD(steps=2), eps=0.1, seed=2**70)
    assert seeded(nn.Linear(4, 3).eval(), x, y).linf.max() > 0


def test_a_slow_attack_is_seen_to_go_on_and_damaged_work_is_named(tmp_path):
    model, test = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).eval(), load("digits")[1]
    attack = CarliniWagner(steps=1, search_steps=1)
    attack_images(model, test, attack, out=tmp_path, n=120, picture=False, show=False)
    assert [path.name for path in sorted(tmp_path.glob("images-*"))] == [
        f"images-{start:06d}.safetensors" for start in (0, 50, 100)
    ]
    (tmp_path / "work.json").write_text("{")
    with pytest.raises(ValueError, match=r"work\.json must be whole"):
        attack_images(model, test, attack, out=tmp_path, n=120, picture=False, show=False)


@pytest.mark.parametrize("eps", ["0.1", True, None, -0.1, float("nan")])
def test_a_radius_that_is_not_a_number_is_refused(eps):
    for kind in (FGSM, BIM, PGD, APGD, Square, WorstCase):
        with pytest.raises(ValueError, match="eps must be a finite number >= 0, got"):
            kind(eps=eps)


@pytest.mark.parametrize("kind", [FGSM, PGD, APGD, Square, WorstCase, JSMA])
def test_eps_wider_than_the_range_suggests_a_fraction(kind):
    with pytest.raises(
        ValueError, match=r"eps must be at most 1\.0, the width of the pixel range, got 8; did you mean 8/255\?"
    ):
        kind(eps=8)
    kind(eps=8, bounds=(0.0, 255.0))
    kind(eps=1.0)
    if kind is not JSMA:
        kind(eps=8, norm="l2")


@pytest.mark.parametrize("kind", [FGSM, BIM, ILCM, PGD, APGD, FAB, Square, JSMA, CarliniWagner, WorstCase])
def test_help_explains_every_setting_and_its_default(kind):
    for setting in inspect.signature(kind).parameters.values():
        given = "" if setting.default is setting.empty else rf", default {re.escape(repr(setting.default))}"
        assert re.search(rf"^{setting.name} : .*{given}\n    \S", kind.__doc__, re.M), setting.name
    assert kind.__doc__.count("Parameters\n-----") == 1
