"""Training from a DataLoader: the same batches give the same weights as from memory, whole runs and resumed ones."""

import dataclasses
import warnings

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Subset,
    TensorDataset,
)
from training_cases import QUICK, SMALL, break_off, same, weights

import mmlda
from mmlda.data import ImageData
from mmlda.models import build
from mmlda.training import Adversary, Recipe, fit
from mmlda.training import step as module
from mmlda.training.batches import Batches
from mmlda.training.loader import LoaderBatches, describe_loader
from mmlda.training.step import Step, Tally, make_optimizer


class Order:
    """A batch sampler with the order in which `fit` takes the images of an `ImageData`."""

    def __init__(self, data, recipe):
        self.batches, self.batch_size = Batches(data, recipe, torch.device("cpu")), recipe.batch_size
        self.recipe, self.step = recipe, 0

    def __len__(self):
        return self.batches.per_epoch

    def __iter__(self):
        self.batches.seek(self.step)
        self.step += len(self)
        yield from self.batches.order.tolist()


class Noisy(torch.utils.data.Dataset):
    """A dataset that augments: each item draws from torch's generator."""

    classes = tuple("0123456789")

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, n):
        x, y = self.data[n]
        return (x + 0.1 * torch.rand(x.shape)).clamp(0, 1), y


def train(loader, recipe=QUICK, model=None, **options):
    model = build(SMALL, seed=0) if model is None else model
    run = fit(model, loader, recipe, show=False, **options)
    return weights(model), run


def test_the_same_batches_give_the_same_weights_as_from_memory(digits):
    data = digits[0].subset(slice(200))
    for workers in (0, 1):
        loader = DataLoader(data, batch_sampler=Order(data, QUICK), num_workers=workers)
        assert same(train(loader)[0], train(data)[0])


def test_a_compiled_step_reads_the_loaders_batches(digits, monkeypatch):
    """As on CUDA, where every step is compiled; the code it is compiled to is left out."""
    monkeypatch.setattr(module, "compile_quietly", lambda part, **options: torch.compile(part, backend="eager"))
    data, cpu = digits[0].subset(slice(96)), torch.device("cpu")
    recipe = dataclasses.replace(QUICK, pad=1, flip=True)
    found = []
    for compiled in (False, True):
        model = build(SMALL, seed=0)
        batches = LoaderBatches(DataLoader(data, batch_size=32), recipe, cpu, 10)
        batches.seek(0)
        assert batches.shape == data.shape
        step = Step(model, batches, make_optimizer(model, recipe, cpu), Tally(cpu, 0, 0.0))
        if compiled:
            step.prepare(compile=True)
        for n in range(4):
            batches.seek(n)
            step()
        found.append(weights(model))
    assert same(*found)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("config", [SMALL, {"backbone": "resnet", "depth": 8, "channels": 1}])
def test_captured_steps_read_the_loader(digits, config):
    model = build(config, seed=0)
    loader = DataLoader(digits[0], batch_size=64, shuffle=True, num_workers=2, pin_memory=True)
    run = fit(model, loader, Recipe(steps=200, optimizer="adam", lr=3e-3), device="cuda", show=False)
    assert run.accuracy > 0.9 and mmlda.accuracy(model, digits[1]).accuracy > 0.8


def test_bytes_and_floats_with_channels_last_are_read_alike(digits):
    images, labels = digits[0].images[:96], digits[0].labels[:96]
    expected = train(DataLoader(TensorDataset(images, labels), batch_size=32))[0]
    floats = DataLoader(TensorDataset(images / 255, labels), batch_size=32)
    assert same(train(floats)[0], expected)
    dictionaries = [{"image": image, "label": label} for image, label in zip(images / 255, labels)]
    assert same(train(DataLoader(dictionaries, batch_size=32))[0], expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_run_sees_the_same_batches(digits, tmp_path, workers, monkeypatch):
    monkeypatch.setattr("mmlda.training.loader.DRAWN", 4)  # random numbers for as many steps at once
    # 7 whole batches an epoch, and one that is skipped: the run stops within its second epoch
    loader = DataLoader(Noisy(digits[0].subset(slice(230))), batch_size=32, shuffle=True, num_workers=workers)
    recipe = Recipe(steps=16, optimizer="adam", lr=1e-3, batch_size=32, pad=1, flip=True)
    whole, run = train(loader, recipe)
    assert run.step == 16
    break_off(loader, recipe, tmp_path, 11, checkpoint_every=5)
    torch.rand(3)  # what else draws from the global generator makes no difference
    resumed, run = train(loader, recipe, out=tmp_path)
    assert run.step == 16 and same(resumed, whole)
    assert not same(train(loader, dataclasses.replace(recipe, seed=1))[0], whole)


@pytest.mark.parametrize("stop", [5, 11])
def test_workers_that_persist_see_the_same_order(digits, tmp_path, stop):
    data = digits[0].subset(slice(230))  # 7 batches an epoch: the run stops in its first epoch, or in its second

    def loader():
        return DataLoader(data, batch_size=32, shuffle=True, num_workers=2, persistent_workers=True)

    recipe = Recipe(steps=16, optimizer="adam", lr=1e-3, batch_size=32)
    whole, _ = train(loader(), recipe)
    fresh = DataLoader(data, batch_size=32, shuffle=True, num_workers=2)
    assert same(train(fresh, recipe)[0], whole)
    used = loader()
    break_off(used, recipe, tmp_path / "a", stop, checkpoint_every=stop)
    break_off(loader(), recipe, tmp_path / "b", stop, checkpoint_every=stop)
    assert same(train(used, recipe, out=tmp_path / "a")[0], whole)
    assert same(train(loader(), recipe, out=tmp_path / "b")[0], whole)


def table(seed=0, spread=0.0):
    """A table of three classes in its own units, and its bounds, which may be wider than its values."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(192) % 3
    x = 100 * torch.eye(3)[y] + 20 * torch.randn(192, 3, generator=generator)
    return mmlda.data.table(x, y, bounds=(x.amin(0) - spread, x.amax(0) + spread))


ROWS = {"backbone": "mlp", "inputs": 3, "num_classes": 3}


def test_a_table_is_trained_on_with_its_bounds(tmp_path):
    data, other = table(), table(seed=1, spread=900.0)
    expected = build(ROWS, seed=0)
    fit(expected, data, QUICK, show=False)
    for number, dataset in enumerate((data, Subset(data, range(192)), ConcatDataset([data[:50], data[50:]]))):
        model = build(ROWS, seed=0)
        loader = DataLoader(dataset, batch_sampler=Order(data, QUICK))
        with warnings.catch_warnings(action="ignore"):
            run = fit(model, loader, QUICK, out=tmp_path / str(number), show=False)
            assert same(weights(model), weights(expected)) and torch.equal(model.bounds, data.bounds)
            assert torch.equal(mmlda.load(tmp_path / str(number)).bounds, data.bounds) and run.step == QUICK.steps
            assert mmlda.accuracy(model, other) == mmlda.accuracy(expected, other)


@pytest.mark.parametrize("workers", [0, 1])
def test_fine_tuning_rescales_a_table_to_the_networks_bounds(workers):
    data, other = table(), table(seed=1, spread=900.0)
    found, kept = [], {"num_workers": workers, "persistent_workers": workers > 0}
    loader = DataLoader(other, batch_sampler=Order(other, QUICK), **kept)
    before = dict(vars(loader))
    for source in (other, loader):
        model = build(ROWS, seed=0)
        fit(model, data, QUICK, show=False)
        with pytest.warns(UserWarning, match="outside the table's bounds and clipped to them") as caught:
            fit(model, source, QUICK, show=False)
        assert len(caught) == 1 and caught[0].filename == __file__
        assert torch.equal(model.bounds, data.bounds)
        found.append(weights(model))
    assert same(*found)
    assert before.keys() == vars(loader).keys()  # nothing is left on the user's loader
    with warnings.catch_warnings(action="error"):
        fit(build(ROWS, seed=0), DataLoader(other, batch_size=32), QUICK, show=False)  # a network without bounds


class Batched(torch.utils.data.Dataset):
    """A dataset whose items are batches."""

    def __init__(self, data, size):
        self.parts = [data.subset(slice(start, start + size)) for start in range(0, len(data), size)]

    def __len__(self):
        return len(self.parts)

    def __getitem__(self, n):
        return self.parts[n].pixels(), self.parts[n].labels


def test_loaders_that_do_not_state_their_batch_size(digits, tmp_path):
    data = digits[0].subset(slice(192))
    plain, _ = train(DataLoader(data, batch_size=32))
    rows = [list(range(start, start + 32)) for start in range(0, 192, 32)]
    for number, loader in enumerate(
        (
            DataLoader(Batched(data, 32), batch_size=None),
            DataLoader(data, batch_sampler=rows),
            DataLoader(data, batch_sampler=BatchSampler(range(192), 32, False)),
        )
    ):
        state = torch.get_rng_state()
        found, run = train(loader)
        assert same(found, plain) and run.recipe.batch_size == 32
        assert torch.equal(state, torch.get_rng_state())  # though a batch was read for its size
        break_off(loader, QUICK, tmp_path / str(number), 10, checkpoint_every=5)
        assert same(train(loader, out=tmp_path / str(number))[0], plain)
    short = DataLoader(data, batch_sampler=[*rows, [0, 1, 2]])  # skipped
    break_off(short, QUICK, tmp_path / "short", 10, checkpoint_every=5)
    assert same(train(short)[0], plain) and same(train(short, out=tmp_path / "short")[0], plain)
    with pytest.raises(ValueError, match="every batch of data must be at most 3 images, got 32"):
        train(DataLoader(data, batch_sampler=[[0, 1, 2], *rows]))
    with pytest.raises(ValueError, match="at least one image, got an empty DataLoader"):
        train(DataLoader(data, batch_sampler=[]))


def test_a_distributed_sampler_inside_a_batch_sampler(digits, monkeypatch):
    monkeypatch.setattr("mmlda.training.loader.share", lambda: (1, 2))
    data = digits[0].subset(slice(128))
    sampler = DistributedSampler(data, num_replicas=2, rank=1)
    loader = DataLoader(data, batch_sampler=BatchSampler(sampler, 16, False))
    batches = LoaderBatches(loader, dataclasses.replace(QUICK, batch_size=32), torch.device("cpu"), 10)
    assert batches.whole == 4 and describe_loader(loader)["images"] == 64
    batches.seek(5)
    assert sampler.epoch == 1


def swapped():
    torch.manual_seed(0)
    return mmlda.swap_head(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 5)), num_classes=10)


@pytest.mark.parametrize("model", [swapped, lambda: build(SMALL, seed=0)])
def test_labels_that_a_network_does_not_have(digits, model):
    x, y = digits[0].images[:200], digits[0].labels[:200]
    for labels, got in ((y + 1, r"1 to 10 \(subtract 1 if they begin at 1\)"), (y * 2, r"0 to 18$")):
        with pytest.raises(ValueError, match=f"labels must be classes from 0 to 9, got {got}"):
            train(DataLoader(TensorDataset(x, labels), batch_size=200), model=model())
        with pytest.raises(ValueError, match=r"model must have at least the 1[19] classes of the data, got 10"):
            train((x, labels), model=model())
    names = ImageData(x, y + 1, tuple("abcdefghijk"))
    with pytest.raises(ValueError, match="model must have at least the 11 classes of the data, got 10"):
        train(DataLoader(names, batch_size=32), model=model())


def test_labels_that_may_begin_at_1_cause_a_warning(digits):
    part = digits[0].subset(digits[0].labels > 0).subset(slice(128))
    loader = DataLoader(TensorDataset(part.images, part.labels), batch_size=32)
    with pytest.warns(UserWarning, match="class 0 of 10 has no images: subtract 1 if the labels begin at 1") as caught:
        train(loader)
    assert caught[0].filename == __file__
    with warnings.catch_warnings(action="error"):
        train(DataLoader(part, batch_size=32))  # a dataset with names numbers its labels itself


def test_the_loaders_batch_size_counts_and_a_short_batch_is_skipped(digits):
    seen = []

    class Watch(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = build(SMALL, seed=0)

        def forward(self, x):
            if self.training:  # not the check that the network takes the images
                seen.append(len(x))
            return self.net(x)

    _, run = train(DataLoader(digits[0].subset(slice(50)), batch_size=20), model=Watch())
    assert set(seen) == {20} and run.recipe.batch_size == 20


def test_adversarial_training_and_accumulation(digits):
    data = digits[0].subset(slice(64))
    adversary = Adversary(attack="pgd", eps=0.1, steps=2)
    recipe = Recipe(steps=4, optimizer="adam", lr=1e-3, adversary=adversary, accumulate=2)
    expected = train(DataLoader(data, batch_size=32), recipe)[0]
    assert same(train(DataLoader(data, batch_size=32), recipe)[0], expected)
    plain = Recipe(steps=4, optimizer="adam", lr=1e-3, accumulate=2)
    assert not same(train(DataLoader(data, batch_size=32), plain)[0], expected)


def test_a_stream_without_a_length(digits, tmp_path):
    class Endless(IterableDataset):
        def __iter__(self):
            return iter([digits[0][n] for n in range(70)])

    loader = DataLoader(Endless(), batch_size=32)  # 2 whole batches an epoch
    _, run = train(loader, out=tmp_path)
    assert run.step == QUICK.steps and run.history[0]["loss"] > run.loss
    assert mmlda.load(tmp_path).num_classes == 10


def test_it_learns(digits):
    train_set, test_set = digits
    model = build(SMALL, seed=0)
    loader = DataLoader(train_set, batch_size=64, shuffle=True)
    fit(model, loader, Recipe(steps=150, optimizer="adam", lr=3e-3), validation=test_set, show=False)
    assert mmlda.accuracy(model, test_set).accuracy > 0.8


def test_what_does_not_fit_gets_one_clear_error(digits):
    data = digits[0].subset(slice(64))
    with pytest.raises(ValueError, match="at least one whole batch of 100 images, got 64"):
        train(DataLoader(data, batch_size=100))
    with pytest.raises(ValueError, match=r"y must be integer or string labels \[N\], got torch.int64 \[\]"):
        train(DataLoader(data, batch_size=None))  # not a dataset of batches
    with pytest.raises(ValueError, match="labels must be classes from 0 to 9, got 3 to 12"):
        train(DataLoader([(torch.zeros(1, 8, 8), 3), (torch.zeros(1, 8, 8), 12)], batch_size=2))
    with pytest.raises(ValueError, match=r"must be in \[0, 1\].*normalisation"):
        train(DataLoader(TensorDataset(torch.randn(8, 1, 8, 8), torch.zeros(8, dtype=torch.long)), batch_size=4))
    with pytest.raises(ValueError, match="craft must be 'online' for a DataLoader, got 'once'"):
        train(
            DataLoader(data, batch_size=32), Recipe(steps=2, adversary=Adversary(attack="fgsm", eps=0.1, craft="once"))
        )
    with pytest.raises(ValueError, match="data must fit the network, got images of 3 x 8 x 8 in 'TensorDataset'"):
        train(DataLoader(TensorDataset(torch.zeros(8, 3, 8, 8), torch.zeros(8, dtype=torch.long)), batch_size=4))
    sizes = DataLoader([(torch.zeros(1, n, n), 0) for n in (8, 8, 9, 9)], batch_size=2)
    with pytest.raises(ValueError, match="every batch of data must be"):
        train(sizes)


def test_images_are_never_all_in_memory(digits):
    """The loader is read as the steps need it."""
    taken = []

    class Counting(torch.utils.data.Dataset):
        def __len__(self):
            return 10**9

        def __getitem__(self, n):
            taken.append(n)
            return digits[0][n % 100]

    train(DataLoader(Counting(), batch_size=32), Recipe(steps=3))
    assert len(taken) == 3 * 32


def test_a_folder_belongs_to_one_loader(digits, tmp_path):
    data = digits[0].subset(slice(96))
    train(DataLoader(data, batch_size=32), out=tmp_path)
    with pytest.raises(ValueError, match="batch_size"):
        train(DataLoader(data, batch_size=16), out=tmp_path)
    assert isinstance(data, ImageData)
    with pytest.raises(ValueError, match="data"):
        train(data, out=tmp_path)
