"""Accuracy and predictions of any model on any data, which leave the model as it was."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import mmlda
from mmlda.data import ImageData, stratified
from mmlda.evaluation import accuracy, predictions
from mmlda.models import build


def test_accuracy_by_class_on_a_biased_set(digits):
    model = build({"backbone": "conv_net", "head": "softmax"}, seed=0).eval()  # untrained: right now and then
    biased = mmlda.data.biased(digits[1], [1.0] + [0.2] * 9, seed=0)
    result = accuracy(model, biased, batch_size=7)
    guess = torch.cat([model(biased.pixels([i])).argmax(1) for i in range(len(biased))])
    right = guess == biased.labels
    assert result.n == len(biased) and result.accuracy == pytest.approx(float(right.double().mean()))
    expected = [float(right[biased.labels == k].double().mean()) for k in range(10)]
    assert result.per_class == pytest.approx(expected)
    assert result.balanced == pytest.approx(sum(expected) / 10)
    assert result.error == pytest.approx(1 - result.accuracy) and 0 < result.error < 1


def test_a_class_without_images_is_not_a_class_that_is_wrong(digits):
    data = ImageData(digits[1].images[:5], torch.tensor([0, 0, 2, 2, 2]), ("a", "b", "c"))
    result = accuracy(build({"backbone": "conv_net", "head": "softmax", "num_classes": 3}, seed=0), data)
    assert result.per_class[1] != result.per_class[1] and result.balanced == result.balanced  # NaN, and a number


def test_every_submodule_keeps_its_mode(digits):
    net = build({"backbone": "conv_net", "head": "softmax"}, seed=0).train()
    net.backbone.layers[1].eval()  # a frozen batch norm
    modes = [module.training for module in net.modules()]
    first = predictions(net, digits[1])
    assert [module.training for module in net.modules()] == modes
    assert torch.equal(first, predictions(net.eval(), digits[1], batch_size=11))


def test_the_mode_comes_back_after_an_error(digits):
    net = nn.Sequential(nn.Flatten(), nn.Linear(3, 10)).train()
    with pytest.raises(ValueError, match="data must fit the network, got images of 1 x 8 x 8 in 'digits'"):
        accuracy(net, digits[1])
    assert net.training and net[1].training


def test_any_model_and_any_kind_of_data(model, digits):
    part = digits[1].subset(slice(60))
    x, y = part.pixels(), part.labels
    expected = accuracy(model, part)
    loader = DataLoader(TensorDataset(x, y), batch_size=7)
    for data in ((x, y), (x.numpy(), y.numpy()), TensorDataset(x, y), loader):
        assert accuracy(model, data) == accuracy(lambda x: model(x), data) == expected
    assert accuracy(model, (x, y), n=50) == accuracy(model, stratified(part, 50))
    assert accuracy(model, (x, y), n=61) == expected
    with pytest.raises(ValueError, match=r"^item 0 of data must be"):
        accuracy(model, [1, 2, 3])


def test_a_name_in_place_of_a_network_is_pointed_to_load(digits):
    words = r"model must be a function from images to logits, got 'mnist-sr'; mmlda.load\('mnist-sr'\) loads a network"
    for measure in (mmlda.accuracy, mmlda.evaluate, mmlda.audit):
        with pytest.raises(ValueError, match=words):
            measure("mnist-sr", digits[1])
