"""Class names and table bounds stay with a network: data that numbers or scales itself otherwise is matched."""

import json
import warnings

import numpy as np
import pytest
import torch
from command_line import mmlda as command
from dataset_files import save
from sklearn.datasets import load_breast_cancer, load_wine
from sklearn.model_selection import train_test_split
from torch.utils.data import ConcatDataset, DataLoader, Subset

import mmlda
from mmlda.data import as_images, images_for, table
from mmlda.evaluation import attack_images
from mmlda.training import checkpoints

NAMES = ("ant", "bee", "cat", "dog")
RECIPE = mmlda.Recipe(steps=80, optimizer="adam", lr=1e-2, batch_size=32, weight_decay=0.0)


def pictures(names, n=12, seed=0):
    """n easily told images per class, and their names: every class has a prototype of its own."""
    generator = torch.Generator().manual_seed(seed)
    prototypes = torch.rand(len(NAMES), 1, 8, 8, generator=torch.Generator().manual_seed(9))
    y = [name for name in names for _ in range(n)]
    noise = 0.02 * torch.randn(len(y), 1, 8, 8, generator=generator)
    return (prototypes[[NAMES.index(name) for name in y]] + noise).clamp(0, 1), y


def network():
    return mmlda.models.build({"backbone": "conv_net", "width": 4, "num_classes": 4, "dim": 8}, seed=0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    model = network()
    mmlda.fit(model, pictures(NAMES), RECIPE, out=folder, show=False)
    return model, folder


class Rows:
    """A dataset with `classes` of its own, as torchvision's and Hugging Face's have them."""

    def __init__(self, x, y):
        self.x, self.classes = x, sorted(set(y))
        self.y = [self.classes.index(name) for name in y]

    def __len__(self):
        return len(self.y)

    def __getitem__(self, n):
        return self.x[n], self.y[n]


# ------------------------------------------------------------------------------------------------ class names


def test_a_test_set_that_lacks_a_class_is_matched_by_name(trained):
    model, x_y = trained[0], pictures(("bee", "dog"), seed=1)
    assert model.classes == NAMES and mmlda.accuracy(model, pictures(NAMES, seed=1)).accuracy == 1
    for data in (x_y, Rows(*x_y), [{"image": x, "label": y} for x, y in zip(*x_y)], as_images(x_y)):
        found = mmlda.accuracy(model, data)
        assert found.accuracy == 1 and np.isnan(found.per_class[0]) and found.per_class[3] == 1
    assert mmlda.evaluate(model, x_y, show=False).clean.number == 1
    assert attack_images(model, x_y, mmlda.attacks.FGSM(eps=1e-3), show=False).number == 1
    audited = mmlda.audit(model, x_y, eps=1e-3, n=None, steps=2, queries=2, show=False)
    assert audited.profile.right == audited.profile.n == 24


def test_numbers_are_matched_by_number_and_unknown_names_refused(trained):
    model, (x, y) = trained[0], pictures(NAMES, seed=1)
    numbers = [NAMES.index(name) for name in y]
    assert mmlda.accuracy(model, (x, numbers)).accuracy == 1
    assert images_for(model, (x[:20], numbers[:20])).classes == NAMES
    with pytest.raises(ValueError, match="data must have classes of the network, ant, bee, cat, dog, got 'cow'"):
        mmlda.accuracy(model, (x[:2], ["cow", "ant"]))
    unnamed = torch.nn.Flatten()
    assert images_for(unnamed, (x[:2], ["cow", "ant"])).classes == ("ant", "cow")  # sorted, without a network's names
    unnamed.classes = ("0", "1", "2", "3")
    assert images_for(unnamed, (x[:2], ["3", "1"])).labels.tolist() == [3, 1]
    assert images_for(unnamed, (x, y)).labels.tolist() == numbers  # as many classes, none of them numbered
    with pytest.raises(ValueError, match=r"data must have classes of the network, 0, 1, 2, 3, got 'ant'"):
        images_for(unnamed, (x[:20], y[:20]))
    unnamed.classes = 7  # an attribute that means something else
    assert images_for(unnamed, (x[:1], ["ant"])).classes == ("ant",)


def test_class_names_are_saved_with_the_network(trained, tmp_path, monkeypatch):
    model, run = trained
    assert json.loads((run / "run.json").read_text())["classes"] == list(NAMES)
    assert mmlda.load(run).classes == NAMES
    mmlda.save(model, tmp_path / "saved")
    assert mmlda.load(tmp_path / "saved").classes == NAMES
    own = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 4))
    mmlda.fit(own, pictures(NAMES), RECIPE, out=tmp_path / "own", show=False)
    mmlda.save(own, tmp_path / "own-saved")
    for folder in ("own", "own-saved"):
        again = mmlda.load(tmp_path / folder, model=torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 4)))
        assert again.classes == NAMES and mmlda.accuracy(again, pictures(("dog",), seed=1)).accuracy == 1
    code = "import torch\n\ndef net():\n    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 4))\n"
    (tmp_path / "own_network.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    for folder in ("own", "own-saved"):
        assert mmlda.zoo.user_network("own_network:net", tmp_path / folder / "model.safetensors").classes == NAMES
    assert mmlda.load("cifar10-mmlda").classes == mmlda.data.CLASSES["cifar10"]
    assert mmlda.load("mnist-sr").classes == mmlda.data.CLASSES["mnist"]
    assert mmlda.swap_head(model, 4).classes is None


def test_huggingface_layout_keeps_class_names(trained, tmp_path):
    hub = pytest.importorskip("mmlda.integrations.huggingface").HubClassifier
    hub.of(trained[0]).save_pretrained(tmp_path)
    assert hub.from_pretrained(tmp_path).classes == NAMES


def test_files_without_class_names_still_work(trained, tmp_path):
    about = json.loads((trained[1] / "run.json").read_text())
    older = {key: about[key] for key in about if key not in ("classes", "sha256")}
    (tmp_path / "run.json").write_text(json.dumps(older))
    weights = checkpoints.read_weights(trained[1] / "model.safetensors")
    checkpoints.save_weights(tmp_path / "model.safetensors", weights)  # without the run's digest
    old = mmlda.load(tmp_path)
    assert old.classes is None
    with pytest.warns(
        UserWarning, match="no class names, so the 2 classes of the data are taken as the first of its 4"
    ):
        mmlda.accuracy(old, pictures(("bee", "dog"), seed=1))
    old.classes = NAMES
    assert mmlda.accuracy(old, pictures(("bee", "dog"), seed=1)).accuracy == 1
    assert mmlda.fit(network(), pictures(NAMES), RECIPE, out=tmp_path, show=False).step == 80
    assert network().classes is None and "classes" not in network().config


def test_a_validation_set_that_lacks_a_class_is_matched_too():
    held = pictures(("bee", "dog"), seed=1)
    run = mmlda.fit(network(), pictures(NAMES), RECIPE, validation=held, show=False)
    assert run.validation.best == 1 and run.validation.data.labels.unique().tolist() == [1, 3]


def test_fine_tuning_keeps_the_numbers_of_known_classes_and_names_new_ones(trained):
    model = mmlda.load(trained[1])
    mmlda.fit(model, pictures(("bee", "dog")), RECIPE, show=False)
    assert model.classes == NAMES and mmlda.accuracy(model, pictures(("dog",), seed=1)).accuracy == 1
    x, y = pictures(NAMES)
    with pytest.warns(UserWarning, match="other classes than before: ant, bee, cat, dog become 1ant, 1bee, 1cat, 1dog"):
        mmlda.fit(model, (x, [f"1{name}" for name in y]), RECIPE, show=False)
    assert model.classes[0] == "1ant"


@pytest.mark.parametrize("strings", [False, True])
def test_fine_tuning_from_a_loader_keeps_the_numbers_of_known_classes(trained, strings):
    model, (x, y) = mmlda.load(trained[1]), pictures(("bee", "dog"))
    data = list(zip(x, y)) if strings else Rows(x, y)  # a list has no classes: strings are matched by themselves
    mmlda.fit(model, DataLoader(data, batch_size=8, shuffle=True), RECIPE, show=False)
    assert model.classes == NAMES and mmlda.accuracy(model, pictures(("bee", "dog"), seed=1)).accuracy == 1
    with pytest.warns(UserWarning, match="other classes than before: ant, bee, cat, dog become cow, dog"):
        mmlda.fit(model, DataLoader(Rows(x, ["cow" if name == "bee" else name for name in y]), 8), RECIPE, show=False)
    assert model.classes == ("cow", "dog")


def test_strings_of_a_loader_need_names():
    own = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 4))
    with pytest.raises(ValueError, match="DataLoader whose dataset has classes where labels are strings, got none"):
        mmlda.fit(own, DataLoader(list(zip(*pictures(NAMES))), batch_size=8), RECIPE, show=False)


def test_datasets_put_together_are_matched_by_name(trained):
    model = mmlda.load(trained[1])
    other = as_images(pictures(NAMES, seed=1), classes=("dog", "cat", "bee", "ant"))  # numbered the other way round
    both = ConcatDataset([other, other])
    for data in (other, both, DataLoader(both, batch_size=8), Subset(both, range(0, 96, 2))):
        assert mmlda.accuracy(model, data).accuracy == 1
        assert mmlda.evaluate(model, data, show=False).clean.number == 1
    mmlda.fit(model, DataLoader(both, batch_size=8, shuffle=True), RECIPE, validation=DataLoader(both, 8), show=False)
    assert model.classes == NAMES and mmlda.accuracy(model, pictures(NAMES, seed=2)).accuracy == 1
    mixed = ConcatDataset([other, as_images(pictures(NAMES, seed=1))])
    words = "must have the same classes, dog, cat, bee, ant, got ant, bee, cat, dog"
    for function in (mmlda.accuracy, mmlda.evaluate, lambda model, data: mmlda.fit(model, data, RECIPE, show=False)):
        for data in (mixed, DataLoader(mixed, batch_size=8)):
            with pytest.raises(ValueError, match=words):
                function(model, data)


def test_train_and_test_set_of_load_are_matched():
    train, test = mmlda.data.load((pictures(NAMES), pictures(("dog",), seed=1)))
    assert test.classes == train.classes == NAMES and test.labels.unique().tolist() == [3]
    with pytest.raises(ValueError, match="data must have classes of the training set, ant, bee, got 'dog'"):
        mmlda.data.load((pictures(("ant", "bee")), pictures(("dog",))))


def test_a_folder_that_lacks_a_class_on_the_command_line(trained, tmp_path):
    for name, part in ((name, part) for name in ("cat", "dog") for part in ("train", "test")):
        for n, x in enumerate(pictures((name,), seed=2)[0]):
            save(tmp_path / "pets" / part / name / f"{n}.png", (x[0] * 255).round().byte().numpy())
    words = ("evaluate", trained[1], "--data", tmp_path / "pets")
    assert json.loads(command(*words, "--json").stdout)[0]["value"] == 1
    for part in ("train", "test"):
        (tmp_path / "pets" / part / "dog").rename(tmp_path / "pets" / part / "cow")
    error = command(*words, code=2).stderr
    assert error == "mmlda: data must have classes of the network, ant, bee, cat, dog, got 'cow'\n"


# ---------------------------------------------------------------------------------------------------- tables


def test_tables_are_scaled_by_the_bounds_of_the_training_set(tmp_path):
    x, y = load_breast_cancer(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(x, y, stratify=y, random_state=0)
    train = table(x_train, y_train)
    model = mmlda.models.build({"backbone": "mlp", "inputs": 30, "num_classes": 2}, seed=0)
    recipe = mmlda.Recipe(steps=100, optimizer="adam", lr=3e-3, batch_size=64)
    mmlda.fit(model, train, recipe, out=tmp_path / "run", show=False)
    with pytest.warns(UserWarning, match=r"of 4290 values, .* in column \d+, are outside the table's bounds"):
        given = table(x_test, y_test, bounds=train.bounds)
    mmlda.save(model, tmp_path / "saved")
    for one in (model, mmlda.load(tmp_path / "run"), mmlda.load(tmp_path / "saved")):
        with warnings.catch_warnings(action="ignore"):
            seen = images_for(one, table(x_test[:20], y_test[:20]))  # scaled by a range of its own
        assert torch.equal(seen.bounds, train.bounds) and torch.allclose(seen.images, given.images[:20], atol=1e-6)
        with pytest.warns(UserWarning, match="outside the table's bounds"):
            found = mmlda.accuracy(one, table(x_test, y_test)).accuracy
        assert found == mmlda.accuracy(one, given).accuracy > 0.9
    with pytest.raises(ValueError, match="eps must be given for a table, as a share of each column's range"):
        mmlda.audit(model, given, show=False)
    assert mmlda.audit(model, given, eps=0.05, n=20, steps=5, queries=10, show=False).verdict


@pytest.fixture(scope="module")
def wine():
    """A network trained on a table, the table, and a test table with bounds eleven times as wide."""
    x, y = load_wine(return_X_y=True)
    train = table(x[::2], y[::2])
    low, high = train.bounds
    test = table(x[1::2], y[1::2], bounds=(low - 5 * (high - low), high + 5 * (high - low)))
    model = mmlda.models.build({"backbone": "mlp", "inputs": 13, "num_classes": 3}, seed=0)
    mmlda.fit(model, train, mmlda.Recipe(steps=200, optimizer="adam", lr=3e-3, batch_size=32), show=False)
    return model, train, test


@pytest.mark.filterwarnings("ignore:.*outside the table's bounds")
def test_a_table_within_other_datasets_is_rescaled(wine):
    model, _, test = wine
    assert mmlda.accuracy(model, test).accuracy > 0.95
    for wrap in (
        lambda data: DataLoader(data, batch_size=16),
        lambda data: DataLoader(data, batch_size=16, num_workers=1),
        lambda data: Subset(data, range(len(data))),
        lambda data: ConcatDataset([Subset(data, range(30)), Subset(data, range(30, len(data)))]),
        lambda data: DataLoader(ConcatDataset([data[:30], data[30:]]), batch_size=16),
    ):
        data = wrap(test)
        assert torch.equal(images_for(model, data).images, images_for(model, test).images)
        assert mmlda.accuracy(model, data) == mmlda.accuracy(model, test)
        part = mmlda.accuracy(model, data, n=50)
        assert part.n == 50 and part.accuracy > 0.9
        ours, theirs = (mmlda.evaluate(model, one, "pgd:0.05", show=False) for one in (data, test))
        for one, other in zip(ours.results, theirs.results):
            assert one.number == other.number and one.data["sha256"] == other.data["sha256"]
    assert attack_images(model, DataLoader(test, 16), mmlda.attacks.FGSM(eps=1e-4), show=False).number > 0.95
    whole = mmlda.audit(model, DataLoader(test, 16), eps=1e-4, n=None, steps=2, queries=2, show=False)
    assert whole.profile.right / whole.profile.n > 0.95


def test_values_outside_the_bounds_are_warned_about_once_per_loader(wine):
    model, _, test = wine
    loader = DataLoader(test, batch_size=8)
    with pytest.warns(UserWarning, match="outside the table's bounds .*; later batches are clipped without") as caught:
        mmlda.accuracy(model, loader)
    assert len([warning for warning in caught if "outside" in str(warning.message)]) == 1


def test_a_table_of_bytes_is_rescaled():
    model = torch.nn.Flatten()
    model.bounds = torch.tensor([[0.0], [510.0]], dtype=torch.float64)
    data = mmlda.data.ImageData(
        torch.tensor([[0], [255]], dtype=torch.uint8), torch.tensor([0, 1]), ("a", "b"), bounds=model.bounds / 2
    )
    assert images_for(model, data).images.flatten().tolist() == [0, 0.5]
