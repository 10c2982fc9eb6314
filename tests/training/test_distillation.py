"""A teacher's probabilities as labels."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

import mmlda
from mmlda.training.step import Objective

PGD = mmlda.Adversary(attack="pgd", eps=0.1, steps=2, random_start=True, share=1.0, pairing=0.5)
RECIPE = mmlda.Recipe(steps=20, optimizer="adam", lr=1e-2, distill=0.75)


def network(seed):
    return mmlda.models.build({"backbone": "conv_net", "head": "mmlda"}, seed=seed)


@pytest.fixture(scope="module")
def digits():
    return mmlda.data.load("digits")[0]


@pytest.mark.parametrize("adversary", [None, PGD, mmlda.Adversary(attack="trades", eps=0.1, steps=2, share=1.0)])
def test_labels_are_mixed_with_the_teachers_probabilities(digits, adversary):
    """The cross-entropy part of the objective equals the formula, summed over classes by hand."""
    recipe = dataclasses.replace(RECIPE, adversary=adversary)
    x, y = digits.pixels()[:8], digits.labels[:8]
    taught = torch.rand(8, 10).softmax(1)
    model = network(0).eval()
    moved = None if adversary is None else (x + 0.05).clamp(0, 1)
    logits = model(x)
    own = logits if adversary is None or adversary.attack == "trades" else model(moved)
    extra = 0.0
    if adversary is PGD:
        extra = 0.5 * (own - logits).square().mean()
    elif adversary is not None:
        p, q = logits.softmax(1), model(moved).log_softmax(1)
        extra = adversary.beta * (p * (p.log() - q)).sum(1).mean()
    labels = 0.75 * taught + 0.25 * torch.eye(10)[y]
    expected = -(labels * own.log_softmax(1)).sum(1).mean() + extra
    loss, _ = Objective(model, recipe)(x, y, moved, taught)
    torch.testing.assert_close(loss, expected)


def test_a_teacher_who_disagrees_teaches_its_own_labels(digits):
    """With distill=1 the network learns what the teacher says, not what the data say."""

    class Wrong(torch.nn.Module):
        def forward(self, x):
            nearest = (x.flatten(1)[:, None] - digits.pixels().flatten(1)[None]).square().sum(2).argmin(1)
            return 20.0 * F.one_hot((digits.labels[nearest] + 1) % 10, 10).float()

    recipe = dataclasses.replace(RECIPE, steps=150, distill=1.0)
    model = mmlda.fit(network(0), digits, recipe, teacher=Wrong(), show=False).model
    predicted = model(digits.pixels()).argmax(1)
    assert (predicted == (digits.labels + 1) % 10).float().mean() > 0.8


def test_the_teacher_is_left_as_it_was(digits):
    teacher = network(1)
    before = {name: tensor.clone() for name, tensor in teacher.state_dict().items()}
    teacher.train()
    mmlda.fit(network(0), digits, RECIPE, teacher=teacher, show=False)
    assert teacher.training and all(p.requires_grad and p.grad is None for p in teacher.parameters())
    for name, tensor in teacher.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_many_equal_one_by_one(digits):
    teacher = network(1)
    plain = dataclasses.replace(RECIPE, distill=0.0)
    runs = mmlda.fit_many([network(0), network(0)], digits, [RECIPE, plain], teacher=teacher, show=False)
    alone = mmlda.fit(network(0), digits, RECIPE, teacher=teacher, show=False)
    for name, tensor in alone.model.state_dict().items():
        assert torch.equal(tensor, runs[0].model.state_dict()[name])
    assert runs[0].loss != runs[1].loss


def test_resuming_asks_for_the_same_teacher(digits, tmp_path):
    mmlda.fit(network(0), digits, RECIPE, teacher=network(1), out=tmp_path, show=False)
    mmlda.fit(network(0), digits, RECIPE, teacher=network(1), out=tmp_path, show=False)
    with pytest.raises(ValueError, match="teacher is"):
        mmlda.fit(network(0), digits, RECIPE, teacher=network(2), out=tmp_path, show=False)


@pytest.mark.parametrize(("distill", "teacher"), [(0.5, None), (0.0, "network")])
def test_a_teacher_comes_with_a_share(digits, distill, teacher):
    with pytest.raises(ValueError, match=r"^teacher must be"):
        recipe = dataclasses.replace(RECIPE, distill=distill)
        mmlda.fit(network(0), digits, recipe, teacher=network(1) if teacher else None, show=False)


def test_the_share_is_a_share():
    with pytest.raises(ValueError, match=r"^distill must be a number in \[0, 1\], got 1.5"):
        dataclasses.replace(RECIPE, distill=1.5)
