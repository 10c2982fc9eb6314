"""Validation along the way: recorded, the best network kept, early stopping, all of it resumable."""

import dataclasses
import json
import weakref

import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import mmlda
from mmlda.data import holdout, long_tailed
from mmlda.training import Recipe
from mmlda.training.run import train

RECIPE = Recipe(steps=40, optimizer="adam", lr=1e-3, batch_size=32)
NOISY = dataclasses.replace(RECIPE, lr=1.0)  # so that the best is not the last


def net(**settings):
    return mmlda.models.build({"backbone": "conv_net", "head": "softmax", "width": 4, **settings}, seed=0)


@pytest.fixture(scope="module")
def parts():
    return holdout(mmlda.data.load("digits")[0], 300)


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values()))


def test_accuracy_is_recorded_and_changes_nothing(parts, tmp_path):
    rest, held = parts
    plain, watched = net(), net()
    mmlda.fit(plain, rest, RECIPE, show=False)
    run = mmlda.fit(watched, rest, RECIPE, validation=held, validate_every=15, out=tmp_path, show=False)
    assert same(plain, watched)
    measured = {entry["step"]: entry["validation"] for entry in run.history if "validation" in entry}
    assert list(measured) == [15, 30, 40]
    assert measured[40] == mmlda.accuracy(watched, held).accuracy
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {line["step"]: line["validation"] for line in lines if "validation" in line} == measured


class Reads(torch.utils.data.Dataset):
    """Counts how many of its images are in memory at a time."""

    def __init__(self, data):
        self.data, self.alive, self.most, self.classes = data, weakref.WeakSet(), 0, data.classes

    def __len__(self):
        return len(self.data)

    def __getitem__(self, row):
        x, y = self.data[row]
        self.alive.add(x)
        self.most = max(self.most, len(self.alive))
        return x, y


@pytest.mark.parametrize("train_on", [lambda rest: rest, lambda rest: DataLoader(rest, batch_size=32)])
def test_a_loader_is_read_batch_by_batch_and_changes_nothing(parts, tmp_path, train_on):
    rest, held = parts
    watched = Reads(held)
    loader = DataLoader(watched, batch_size=20, shuffle=True)
    given = {"validate_every": 15, "show": False}
    models = []
    for validation in (held, loader):
        model = net()
        model.backbone.dropout = torch.nn.Dropout(0.5)  # draws from torch's generator
        model.backbone.register_forward_hook(lambda net, inputs, z: net.dropout(z))
        models.append(model)
        run = mmlda.fit(model, train_on(rest), RECIPE, validation=validation, out=tmp_path / str(len(models)), **given)
        measured = [entry["validation"] for entry in run.history if "validation" in entry]
        assert measured[-1] == mmlda.accuracy(model, held).accuracy and len(measured) == 3
    assert same(*models) and watched.most <= 42
    assert json.loads((tmp_path / "2" / "run.json").read_text())["validation"]["images"] == 300
    wrong = DataLoader(Reads(held.subset(slice(9))), batch_size=3)
    with pytest.raises(ValueError, match=r"validation\.images is 300 there, but 9 was requested"):
        mmlda.fit(net(), train_on(rest), RECIPE, validation=wrong, out=tmp_path / "2", **given)


@pytest.mark.filterwarnings("ignore:.*outside the table's bounds")
def test_a_table_to_validate_on_is_rescaled():
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(192) % 3
    x = 100 * torch.eye(3)[y] + 20 * torch.randn(192, 3, generator=generator)
    data, wide = mmlda.data.table(x[:128], y[:128]), mmlda.data.table(x[128:], y[128:], bounds=(-900, 900))
    measured = []
    for held in (wide, DataLoader(wide, batch_size=10), Subset(wide, range(64)), DataLoader(Subset(wide, range(64)))):
        for source in (data, DataLoader(data, batch_size=32)):
            model = mmlda.models.build({"backbone": "mlp", "inputs": 3, "num_classes": 3}, seed=0)
            run = mmlda.fit(model, source, dataclasses.replace(RECIPE, steps=120), validation=held, show=False)
            assert run.validation.best > 0.9 and run.history[-1]["validation"] == mmlda.accuracy(model, wide).accuracy
            measured.append(run.validation.best)
    assert len(set(measured[::2])) == 1  # however the validation set is given


@pytest.mark.parametrize("average", [0.0, 0.9])
def test_the_best_network_is_kept_on_request(parts, average):
    rest, held = parts
    recipe = dataclasses.replace(NOISY, average=average)
    model = net()
    run = mmlda.fit(model, rest, recipe, validation=held, validate_every=4, keep_best=True, show=False)
    measured = {entry["step"]: entry["validation"] for entry in run.history if "validation" in entry}
    assert mmlda.accuracy(model, held).accuracy == max(measured.values()) == run.validation.best
    assert measured[run.validation.best_step] == run.validation.best
    if not average:
        assert run.validation.best > measured[40]  # otherwise this test shows nothing


def test_early_stopping(parts, tmp_path):
    rest, held = parts
    still = dataclasses.replace(RECIPE, lr=0.0, weight_decay=0.0)
    model = net(batch_norm=False)
    early = {"validation": held, "validate_every": 5, "patience": 2, "out": tmp_path, "show": False}
    run = mmlda.fit(model, rest, still, **early)
    assert run.step == 15 and run.history[-1]["step"] == 15  # the first is the best, then two without improvement
    again = mmlda.fit(net(batch_norm=False), rest, still, **early)
    assert again.step == 15 and len(again.history) == len(run.history)


class Killed(Exception):
    pass


@pytest.mark.parametrize("kill", [7, 18, 33])
def test_a_killed_run_resumes_to_the_same_best_network(parts, tmp_path, kill, monkeypatch):
    rest, held = parts
    given = {"validation": held, "validate_every": 4, "keep_best": True, "checkpoint_every": 6, "show": False}
    expected = net()
    run = mmlda.fit(expected, rest, NOISY, **given)
    count, rate = [0], Recipe.rate

    def dies(self, step):
        count[0] += step == kill
        if step == kill:
            raise Killed
        return rate(self, step)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Recipe, "rate", dies)
        mmlda.fit(net(), rest, NOISY, out=tmp_path, **given)
    resumed = net()
    again = mmlda.fit(resumed, rest, NOISY, out=tmp_path, **given)
    assert same(resumed, expected) and again.validation.best_step == run.validation.best_step
    assert [entry.get("validation") for entry in again.history if "validation" in entry] == [
        entry["validation"] for entry in run.history if "validation" in entry
    ]
    assert same(mmlda.load(str(tmp_path)), expected)


def test_arguments_without_a_validation_set_are_refused(parts):
    for given in ({"keep_best": True}, {"patience": 2}, {"validate_every": 5}):
        with pytest.raises(ValueError, match="validation must be given with keep_best, patience and validate_every"):
            mmlda.fit(net(), parts[0], RECIPE, show=False, **given)
    for given in ({"patience": 0}, {"validate_every": 0}):
        with pytest.raises(ValueError, match="must be an integer >= 1, got 0"):
            mmlda.fit(net(), parts[0], RECIPE, validation=parts[1], show=False, **given)


def test_a_validation_set_that_does_not_fit_is_refused_before_training(parts, tmp_path):
    x, y = torch.rand(4, 3, 8, 8), torch.arange(4)
    with pytest.raises(ValueError, match=r"validation must have the shape \(1, 8, 8\) .*, got \(3, 8, 8\)"):
        mmlda.fit(net(), parts[0], RECIPE, validation=(x, y), out=tmp_path / "x", show=False)
    with pytest.raises(ValueError, match="validation must have at most the 10 classes of the network, got 13"):
        mmlda.fit(net(), parts[0], RECIPE, validation=(x[:, :1], y + 9), out=tmp_path / "x", show=False)
    loader = DataLoader(TensorDataset(x, y), batch_size=2)
    with pytest.raises(ValueError, match=r"validation must have the shape \(1, 8, 8\) .*, got \(3, 8, 8\)"):
        mmlda.fit(net(), parts[0], RECIPE, validation=loader, out=tmp_path / "x", show=False)
    assert not (tmp_path / "x").exists()


def test_fit_many_validates_each_network(parts):
    rest, held = parts
    given = {"validation": held, "validate_every": 4, "keep_best": True, "show": False}
    alone, models = net(), [net(), net()]
    expected = mmlda.fit(alone, rest, NOISY, **given)
    runs = mmlda.fit_many(models, rest, [NOISY, RECIPE], **given)
    assert same(models[0], alone) and runs[0].validation.best_step == expected.validation.best_step
    assert [mmlda.accuracy(model, held).accuracy for model in models] == [run.validation.best for run in runs]


# ------------------------------------------------------------------------------------------- continuing a run


def test_more_steps_lengthen_a_run(parts, tmp_path):
    straight = net()
    mmlda.fit(straight, parts[0], dataclasses.replace(RECIPE, steps=60), show=False)
    mmlda.fit(net(), parts[0], RECIPE, out=tmp_path, show=False)
    longer = net()
    run = mmlda.fit(longer, parts[0], dataclasses.replace(RECIPE, steps=60), out=tmp_path, show=False)
    assert run.step == 60 and same(longer, straight)
    assert json.loads((tmp_path / "run.json").read_text())["recipe"]["steps"] == 60
    with pytest.raises(ValueError, match=r"recipe\.steps is 60 there, but 40 was requested"):
        mmlda.fit(net(), parts[0], RECIPE, out=tmp_path, show=False)


def test_the_folder_alone_resumes_a_run(tmp_path):
    given = {"n": 200, "validation": 50, "priors": "empirical", "steps": 20, "head": "softmax", "model": {"width": 4}}
    run, _ = train("digits", out=tmp_path, show=False, keep_best=True, seed=3, **given)
    again, test = train(out=tmp_path, show=False)
    assert again.step == 20 and same(run.model, again.model) and test.n == 360
    assert again.validation.best == run.validation.best and again.validation.best_step == run.validation.best_step
    longer, _ = train(out=tmp_path, steps=30, show=False)
    straight, _ = train("digits", show=False, keep_best=True, seed=3, **{**given, "steps": 20})
    assert longer.step == 30 and longer.recipe.seed == 3 and len(longer.validation.data) == 50
    assert longer.validation.every == run.validation.every == straight.validation.every
    with pytest.raises(ValueError, match=r"steps must be at least 30, those of the run in .*, got 10"):
        train(out=tmp_path, steps=10, show=False)


def test_a_fine_tuned_run_without_a_checkpoint_needs_its_start(tmp_path):
    train("digits", out=tmp_path, start=net(), steps=5, show=False)
    for path in (*tmp_path.glob("step-*"), tmp_path / "model.safetensors"):
        path.unlink()
    with pytest.raises(ValueError, match="start must be the network to fine-tune"):
        train(out=tmp_path, show=False)


# ---------------------------------------------------------------------------------- long tails and many classes


@pytest.mark.parametrize("head", ["mmlda", "softmax"])
def test_long_tailed_training_with_its_priors_and_prediction_with_uniform_ones(head):
    data, test = mmlda.data.load("digits")
    tail = long_tailed(data, imbalance=50)
    config = {"backbone": "conv_net", "head": head, "width": 8, "priors": tail.priors.tolist()}
    model = mmlda.models.build(config, seed=0)
    mmlda.fit(model, tail, dataclasses.replace(RECIPE, steps=300, lr=3e-3), show=False)
    before, after = (mmlda.accuracy(one, test) for one in (model, model.with_priors(None)))
    assert after.balanced > before.balanced + 0.02 and after.per_class[9] > before.per_class[9]
    assert model.with_priors(None).backbone is model.backbone and model.head.priors[0] > model.head.priors[9]
    rebuilt = mmlda.models.build(model.config)
    rebuilt.load_state_dict(model.state_dict())
    assert torch.allclose(rebuilt.head.priors, model.head.priors)


def test_100_classes_in_64_dimensions_learn():
    config = {"backbone": "resnet", "depth": 8, "channels": 1, "num_classes": 100, "head": "mmlda"}
    full = mmlda.models.build({"depth": 32, "num_classes": 100, "head": "mmlda"}, seed=0)
    assert full.head.means.shape == (100, 64) and full(torch.rand(2, 3, 32, 32)).shape == (2, 100)
    assert mmlda.max_cosine(full.head.means.double()) < 1e-6  # more than Algorithm 1 allows: pairs of opposite means
    generator = torch.Generator().manual_seed(0)
    prototypes = torch.rand(100, 1, 8, 8, generator=generator)
    y = torch.arange(100).repeat(10)
    x = (prototypes[y] + 0.05 * torch.randn(1000, 1, 8, 8, generator=generator)).clamp(0, 1)
    model = mmlda.models.build(config, seed=0)
    mmlda.fit(model, (x, y), dataclasses.replace(RECIPE, steps=150, batch_size=100, lr=5e-3), show=False)
    assert mmlda.accuracy(model, (x, y)).accuracy > 0.3  # chance is 0.01


def test_a_loader_cannot_be_shared_or_sharded(parts, monkeypatch):
    loader = DataLoader(parts[0], batch_size=32, num_workers=1, persistent_workers=True)
    with pytest.raises(ValueError, match="validation must be another DataLoader than data if workers persist"):
        mmlda.fit(net(), loader, Recipe(steps=4, batch_size=32), validation=loader, show=False)
    monkeypatch.setattr("mmlda.training.matching.share", lambda: (0, 2))
    sharded = DataLoader(parts[1], batch_size=32, sampler=DistributedSampler(parts[1], num_replicas=2, rank=0))
    with pytest.raises(ValueError, match="validation must be a DataLoader without a DistributedSampler"):
        mmlda.fit(net(), parts[0], Recipe(steps=4, batch_size=32), validation=sharded, show=False)
