"""Accuracy and predictions of any model on any data, which leave the model as it was."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import mmlda
from mmlda.attacks import Square
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
    with pytest.raises(ValueError, match=r"model must take inputs \[16, 1, 8, 8\], got RuntimeError: mat1 and"):
        accuracy(net, digits[1])
    assert net.training and net[1].training


def test_a_random_model_is_judged_by_its_mean_probabilities_with_one_warning(model, digits):
    noisy = lambda v: model(v + 0.3 * torch.randn_like(v))  # noqa: E731
    torch.manual_seed(0)
    one_pass = float((noisy(digits[1].pixels()).argmax(1) == digits[1].labels).double().mean())
    with pytest.warns(UserWarning, match="the model is random.*16 passes") as caught:
        found = accuracy(noisy, digits[1], batch_size=50)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert found.accuracy > one_pass + 0.05


def test_a_deterministic_model_is_asked_twice_about_a_few_images_only(model, digits):
    sizes = []

    def seen(v):
        sizes.append(len(v))
        return model(v)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accuracy(seen, digits[1])
    assert sizes == [16, 16, len(digits[1])]


@pytest.mark.parametrize(
    "wrong, what",
    [
        (lambda v: v.flatten(1).numpy(), "must return logits .*, got a ndarray"),
        (lambda v: (v.flatten(1),), "must return logits .*, got a tuple"),
        (lambda v: SimpleNamespace(logits=v), r"must return logits .*, got a SimpleNamespace \(return its .logits\)"),
        (lambda v: v.sum(), r"must return logits .*, got a float32 tensor \[\]"),
        (lambda v: v.flatten(1)[1:], r"must return logits \[16, classes\].*, got a float32 tensor \[15, 64\]"),
        (lambda v: v.flatten(1).argmax(1), "must return logits .*, got an int64 tensor"),
        (lambda v: v.flatten(1).to_sparse(), "must return logits .*, got a sparse float32 tensor"),
        (lambda: 0, "must take inputs .*, got TypeError"),
        (nn.Linear, "model must be a module or a function from images to logits, got <class"),
        (3, "model must be a module or a function from images to logits, got 3"),
    ],
)
def test_what_is_no_classifier_is_refused_in_a_sentence(digits, wrong, what):
    data, what = digits[1].subset(slice(16)), what.replace("images to", "(images|samples) to")
    for measure in (accuracy, mmlda.evaluate):
        with pytest.raises(ValueError, match=what):
            measure(wrong, data)
    with pytest.raises(ValueError, match=what):
        Square(eps=0.1, queries=2)(wrong, data.pixels(), data.labels)


def test_a_device_that_is_not_there_is_named(model, digits):
    with pytest.raises(ValueError, match="device must be available, got 'nope'"):
        accuracy(model, digits[1], device="nope")


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


@pytest.mark.parametrize("images", [torch.float32, torch.uint8])
def test_a_loader_is_read_batch_by_batch(images):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randint(0, 256, (70, 1, 4, 4), generator=generator), torch.randint(0, 3, (70,), generator=generator)
    pixels = x.to(torch.uint8) if images == torch.uint8 else x / 255
    sizes = []

    def model(x):
        sizes.append(len(x))
        return x.flatten(1)[:, :3]

    found = mmlda.accuracy(model, DataLoader(TensorDataset(pixels, y), batch_size=32))
    assert sizes == [16, 16, 32, 32, 6]  # two passes over a few images show whether the model is random
    assert found == mmlda.accuracy(model, (x / 255, y)) and found.n == 70 and 0 < found.accuracy < 1


@pytest.mark.parametrize("kind", ["classifier", "swapped", "followed"])
def test_many_classes_are_predicted_without_their_logits(digits, monkeypatch, kind):
    L, data = 20_000, digits[1].subset(slice(60))
    torch.manual_seed(0)
    if kind == "classifier":
        net = build({"backbone": "conv_net", "num_classes": L, "dim": 64}, seed=0)
    else:
        net = mmlda.swap_head(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), num_classes=L, dim=64)
        net = nn.Sequential(net, nn.Hardtanh()) if kind == "followed" else net
    head = next(module for module in net.modules() if isinstance(module, mmlda.MaxMahalanobisHead))
    x = data.pixels()
    y = net.eval()(x).argmax(1)
    y[::3] = (y[::3] + 1) % L
    sizes, forward = [], head._logits
    monkeypatch.setattr(head, "_logits", lambda z: sizes.append(len(z)) or forward(z))
    for images in ((x, y), DataLoader(TensorDataset(x, y), batch_size=32)):
        found = accuracy(net, images)
        assert found.accuracy == pytest.approx(2 / 3) and repr(found) == repr(accuracy(lambda x: net(x), images))
    sizes.clear()
    assert torch.equal(predictions(net, data, batch_size=30), net(x).argmax(1))
    assert (30 in sizes) == (kind == "followed")
    with pytest.raises(ValueError, match=r"^model must return logits \[60, 20001\] .*, got \[60, 20000\]"):
        accuracy(net, ImageData(x, y, tuple(map(str, range(L + 1)))))


def test_class_names_of_a_loader_are_matched_with_those_of_the_network():
    class Named(torch.utils.data.TensorDataset):
        classes = ("bee", "cat")

    def model(x):
        return x.flatten(1)

    model.classes = ("ant", "bee", "cat")
    x = torch.eye(3)[[1, 2, 2]].view(3, 1, 1, 3)
    assert mmlda.accuracy(model, DataLoader(Named(x, torch.tensor([0, 1, 1])), batch_size=2)).accuracy == 1.0


def test_a_name_in_place_of_a_network_is_pointed_to_load(digits):
    words = r"model must be a module or a function .*, got 'mnist-sr'; mmlda.load\('mnist-sr'\) loads a network"
    for measure in (mmlda.accuracy, mmlda.evaluate, mmlda.audit):
        with pytest.raises(ValueError, match=words):
            measure("mnist-sr", digits[1])


def test_nan_is_no_prediction():
    def model(x):
        return torch.where(x.flatten(1)[:, :1] > 0.5, torch.nan, x.flatten(1)[:, :2])

    data = (torch.tensor([0.0, 0.2, 0.9]).view(3, 1, 1, 1).expand(3, 1, 2, 2), torch.tensor([0, 1, 0]))
    for images in (data, DataLoader(TensorDataset(*data), batch_size=2)):
        with pytest.raises(ValueError, match=r"model must return finite logits, got NaN for 1 of \d images"):
            mmlda.accuracy(model, images)


def test_a_hook_that_changes_the_logits_counts_with_many_classes_too():
    model = mmlda.Classifier(mmlda.models.MLP(inputs=4, hidden=(8,)), mmlda.MaxMahalanobisHead(10_000, 64)).eval()
    x = torch.rand(6, 4)
    y = model(x).argmax(1)
    assert model.head.structured and mmlda.accuracy(model, (x, y)).accuracy == 1
    model.register_forward_hook(lambda module, inputs, z: z.roll(1, 1))
    assert mmlda.accuracy(model, (x, y)).accuracy == 0
