"""Exported files compute what the network computes, and a wrong exporter is refused."""

import json
import sys

import numpy as np
import pytest
import torch
from sklearn.datasets import load_iris, load_wine
from torch.utils.data import DataLoader, TensorDataset

import mmlda
from mmlda.integrations import export as module
from mmlda.integrations.export import ExportMismatch, export
from mmlda.models import build

onnxruntime = pytest.importorskip("onnxruntime", reason="the extra mmlda[onnx] is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")


def run_onnx(path, x):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (name,) = [one.name for one in session.get_inputs()]
    return name, [torch.from_numpy(part) for part in session.run(["logits", "probabilities"], {name: x.numpy()})]


@pytest.fixture(scope="module")
def network():
    """A Resnet whose batch norms have statistics of their own."""
    model = build({"backbone": "resnet", "depth": 8, "channels": 1, "num_classes": 10}, seed=0)
    with torch.no_grad():
        for _ in range(3):
            model(torch.rand(32, 1, 8, 8))
    return model.eval()


@pytest.fixture(scope="module")
def images():
    return mmlda.data.load("digits")[1].pixels(slice(0, 20))


def test_onnx_has_logits_and_probabilities_for_any_batch_size(network, images, tmp_path):
    path = mmlda.export(network, tmp_path / "model.onnx", images=images)
    for size in (1, 2, 20):
        name, (logits, probabilities) = run_onnx(path, images[:size])
        with torch.no_grad():
            torch.testing.assert_close(logits, network(images[:size]), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(probabilities, logits.softmax(1))
    assert name == "images" and [file.name for file in tmp_path.iterdir()] == ["model.onnx"]


def test_pt2_loads_without_the_package(network, images, tmp_path):
    program = torch.export.load(export(network, tmp_path / "model.pt2", images=images))
    logits, probabilities = program.module()(images[:5])
    torch.testing.assert_close(logits, network(images[:5]))
    torch.testing.assert_close(probabilities, logits.softmax(1))


def test_a_network_that_ships(tmp_path):
    path = export("mnist-mmlda", tmp_path / "model.onnx", root=tmp_path)
    x = torch.rand(4, 1, 28, 28)
    torch.testing.assert_close(run_onnx(path, x)[1][0], mmlda.load("mnist-mmlda")(x), rtol=1e-3, atol=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("name", mmlda.zoo.names())
def test_every_network_that_ships(name, tmp_path):
    assert export(name, tmp_path / "model.onnx", root=tmp_path).is_file()


def test_a_fitted_estimator(tmp_path):
    from mmlda.integrations.sklearn import MaxMahalanobisClassifier

    X, y = load_iris(return_X_y=True)
    estimator = MaxMahalanobisClassifier(random_state=0, max_iter=20).fit(X, y)
    name, (_, probabilities) = run_onnx(export(estimator, tmp_path / "m.onnx"), torch.tensor(X, dtype=torch.float32))
    assert name == "features"
    np.testing.assert_allclose(probabilities, estimator.predict_proba(X), atol=1e-4)


@pytest.mark.parametrize("suffix", [".onnx", ".pt2"])
def test_a_column_that_float32_cannot_hold_is_refused(suffix, tmp_path):
    from mmlda.integrations.sklearn import MaxMahalanobisClassifier

    rng = np.random.default_rng(0)
    X, path = np.c_[1.7e9 + rng.uniform(0, 2000, 400), rng.normal(size=400)], tmp_path / f"m{suffix}"
    y = X[:, 0] > 1.7e9 + 1000
    estimator = MaxMahalanobisClassifier(random_state=0, max_iter=100).fit(X, y)
    for images in (None, X, (X, y)):
        with pytest.raises(ExportMismatch, match=r"got a difference of .*float32, so scale the columns of the table"):
            export(estimator, path, images=images)
    assert not list(tmp_path.iterdir())
    X[:, 0] -= 1.7e9
    assert export(MaxMahalanobisClassifier(random_state=0, max_iter=9).fit(X, y), path, images=X).is_file()


def test_an_estimator_of_a_float32_table_with_an_offset(tmp_path):
    from mmlda.integrations.sklearn import MaxMahalanobisClassifier

    X, y = load_wine(return_X_y=True)
    X = (X + 1e4).astype(np.float32)
    estimator = MaxMahalanobisClassifier(random_state=0, max_iter=9).fit(X, y)
    _, (_, probabilities) = run_onnx(export(estimator, tmp_path / "m.onnx"), torch.from_numpy(X))
    np.testing.assert_allclose(probabilities, estimator.predict_proba(X), atol=1e-5)


@pytest.fixture(scope="module")
def wine():
    """A network on a table, and rows to test it on, in the table's own units; column 2 is constant."""
    X, y = load_wine(return_X_y=True)
    X[:, 2] = 5.0
    train = mmlda.data.table(X[::2], y[::2])
    model = build({"backbone": "mlp", "inputs": 13, "num_classes": 3}, seed=0)
    mmlda.fit(model, train, mmlda.Recipe(steps=100, optimizer="adam", lr=3e-3, batch_size=64), show=False)
    return model.eval(), X[1::2], y[1::2]


@pytest.mark.filterwarnings("ignore:.*outside the table's bounds")
@pytest.mark.parametrize("suffix", [".onnx", ".pt2"])
def test_a_table_is_in_its_own_units(suffix, wine, tmp_path):
    model, X, y = wine
    test = mmlda.data.table(X, y, bounds=model.bounds)
    x = torch.tensor(X, dtype=torch.float32)
    loader = DataLoader(TensorDataset(test.images, test.labels), batch_size=50)
    for images in (None, X, (X, y), test, mmlda.data.table(X, y), loader):
        path = export(model, tmp_path / f"m{suffix}", images=images)
        run = torch.export.load(path).module() if suffix == ".pt2" else lambda x, path=path: run_onnx(path, x)[1]
        logits, probabilities = run(x)
        with torch.no_grad():
            torch.testing.assert_close(logits, model(test.images), rtol=1e-3, atol=1e-3)
        accuracy = float((probabilities.argmax(1).numpy() == y).mean())
        assert accuracy == pytest.approx(mmlda.accuracy(model, test).accuracy) and accuracy > 0.9
    torch.testing.assert_close(run(x * 1000)[0], run(x.where(x == 0, 1e6))[0])  # clipped, as mmlda.data.table does


def test_the_inputs_of_a_table_are_within_its_bounds(wine, tmp_path, monkeypatch):
    model, X, y = wine
    seen = []
    monkeypatch.setattr(module, "_compare", lambda network, run, x, kind: seen.append((kind, x)))
    low, high = model.bounds
    own = torch.tensor(X, dtype=torch.float64).sub(low).div(high - low)
    inside = ((own >= 0) & (own <= 1)).all(1)
    X, y, own = X[inside], y[inside], own[inside].float()
    pairs = TensorDataset(own, torch.tensor(y))
    others = mmlda.data.table(X, y, bounds=(0.0, 1e4))
    for images in (X, (X, y), mmlda.data.table(X, y), others, pairs, DataLoader(pairs, batch_size=17)):
        export(model, tmp_path / "m.pt2", images=images)
    for kind, x in seen:
        assert bool(((x >= low) & (x <= high)).all()) if kind == "random" else np.allclose(x, X[: len(x)], atol=1e-3)
    with pytest.raises(ValueError, match=r"got those of shape \[1\] \(the network's table has 13 columns\)"):
        export(model, tmp_path / "m.pt2", images=X[:, :1])


def test_a_network_with_a_backbone_of_ones_own_on_a_table(wine, tmp_path):
    _, X, y = wine
    model = torch.nn.Sequential(torch.nn.Linear(13, 3)).eval()
    model.bounds = mmlda.data.table(X, y).bounds
    name, (logits, _) = run_onnx(export(model, tmp_path / "m.onnx"), torch.tensor(X, dtype=torch.float32))
    assert name == "features"
    with torch.no_grad():
        torch.testing.assert_close(logits, model(mmlda.data.table(X, y).images), rtol=1e-4, atol=1e-4)


def test_a_table_that_float32_cannot_hold_is_refused(tmp_path):
    model = build({"backbone": "mlp", "inputs": 2, "num_classes": 2, "C": 1e4}, seed=0)
    model.bounds = torch.tensor([[1.7e9, 0.0], [1.7e9 + 100, 1.0]], dtype=torch.float64)
    with pytest.raises(ExportMismatch, match="float32, so scale the columns of the table"):
        export(model, tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


def test_labels_that_json_has_not(tmp_path):
    from mmlda.integrations.sklearn import MaxMahalanobisClassifier

    X, y = load_iris(return_X_y=True)
    days = np.array(["2020-01-01", "2020-01-02", "2020-01-03"], dtype="datetime64[D]")
    for dates in (days, days.astype("datetime64[s]")):
        fitted = MaxMahalanobisClassifier(random_state=0, max_iter=2).fit(X, dates[y])
        session = onnxruntime.InferenceSession(export(fitted, tmp_path / "m.onnx"))
        assert json.loads(session.get_modelmeta().custom_metadata_map["classes"]) == dates.astype(str).tolist()


def test_a_class_with_prior_0(images, tmp_path):
    model = build({"backbone": "conv_net", "num_classes": 3, "priors": [0.5, 0.5, 0.0]}, seed=0).eval()
    _, (logits, probabilities) = run_onnx(export(model, tmp_path / "m.onnx", images=images), images[:4])
    assert bool((logits[:, 2] == -torch.inf).all()) and bool((probabilities[:, 2] == 0).all())
    with pytest.raises(ExportMismatch, match="logits must be infinite where the network's are on 3 real inputs"):
        module._compare(model, lambda x: (model(x).detach().clamp(min=-9), model(x).softmax(1)), images[:3], "real")


def test_onnx_names_the_batch_axis_and_the_classes(network, images, tmp_path):
    from mmlda.integrations.sklearn import MaxMahalanobisClassifier

    def session(model, **options):
        return onnxruntime.InferenceSession(export(model, tmp_path / "m.onnx", **options))

    plain = session(network, images=images)
    assert [value.shape[0] for value in (*plain.get_inputs(), *plain.get_outputs())] == ["batch"] * 3
    assert "classes" not in plain.get_modelmeta().custom_metadata_map
    named = build({"backbone": "mlp", "inputs": 4, "num_classes": 2}, seed=0)
    named.classes = ("cat", "dog")
    estimator = MaxMahalanobisClassifier(random_state=0, max_iter=2, early_stopping=True).fit(
        *load_iris(return_X_y=True)
    )
    for model, classes in ((named, ["cat", "dog"]), (estimator, [0, 1, 2])):
        assert json.loads(session(model).get_modelmeta().custom_metadata_map["classes"]) == classes


def test_the_model_keeps_its_mode_and_weights(network, images, tmp_path):
    network.train()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    export(network, tmp_path / "model.pt2", images=images)
    assert network.training
    network.eval()
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())


class Wrong(torch.nn.Module):
    """What a wrong exporter makes of a network."""

    def __init__(self, model, change):
        super().__init__()
        self.model, self.change = model, change

    def forward(self, x):
        return self.change(self.model(x))


@pytest.mark.parametrize("suffix", [".onnx", ".pt2"])
def test_a_wrong_exporter_is_refused_and_leaves_no_file(suffix, network, images, tmp_path, monkeypatch):
    right = module._program
    monkeypatch.setattr(module, "_program", lambda model, x: right(Wrong(model, lambda logits: logits * 1.01), x))
    with pytest.raises(ExportMismatch, match="exported logits must be within"):
        export(network, tmp_path / f"model{suffix}", images=images)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda z: (z * float("nan"), z.softmax(1)), "logits must be within"),
        (lambda z: (z[:1], z.softmax(1)), "must have shape"),
        (lambda z: (z, z.sigmoid()), "probabilities must be"),
        (lambda z: (z, z.softmax(1) + 0.01), "probabilities must be"),
    ],
)
def test_what_counts_as_a_mismatch(change, message, network, images):
    with pytest.raises(ExportMismatch, match=message), torch.no_grad():
        module._compare(network, lambda x: change(network(x)), images[:3], "real")


def test_the_tolerance_of_probabilities_does_not_grow_with_the_logits(images):
    model = build({"backbone": "conv_net", "num_classes": 2, "C": 1e10}, seed=0).eval()
    with pytest.raises(ExportMismatch, match="probabilities must be those of the network"), torch.no_grad():
        module._compare(model, lambda x: (model(x), 1 - model(x).softmax(1)), images[:3], "real")


def test_real_images_in_any_form_are_compared_in_0_to_1(network, images, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(module, "_compare", lambda network, run, x, kind: seen.append(x) if kind == "real" else None)
    digits = mmlda.data.load("digits")[1]
    pairs = TensorDataset(images, digits.labels[:20])
    forms = [images, images.numpy(), digits, digits.images[:20], images[:, 0], (images, digits.labels[:20].tolist())]
    forms += [pairs, DataLoader(pairs, batch_size=17), "digits", {"image": images, "label": digits.labels[:20]}]
    for given in forms:
        export(network, tmp_path / "model.pt2", images=given)
    assert all(torch.equal(x, images[: len(x)]) for x in seen) and len(seen) == len(forms) * len(module.BATCHES)


def test_an_error_on_real_images_alone_is_found(network, images, tmp_path, monkeypatch):
    real = module._pt2

    def wrong_on_digits(program):
        content, run = real(program)
        return content, lambda x: run(x) if x.mean() > 0.45 else tuple(part + 1 for part in run(x))

    monkeypatch.setattr(module, "_pt2", wrong_on_digits)
    with pytest.raises(ExportMismatch, match="1 real inputs"):
        export(network, tmp_path / "model.pt2", images=images)


def test_mistakes_are_named(network, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"suffix of path must be one of .onnx, .pt2, got '.pb'"):
        export(network, tmp_path / "model.pb")
    with pytest.raises(ValueError, match=r"images must be given \(--data on the command line\) for a network whose"):
        export(network, tmp_path / "model.onnx")
    with pytest.raises(ValueError, match=r"images must fit the network, got those of shape \[3, 8, 8\] \(Given groups"):
        export(network, tmp_path / "model.onnx", images=torch.rand(2, 3, 8, 8))
    with pytest.raises(
        ValueError, match=r"x must be in \[0, 1\], got values from 0 to 16 \(put the normalisation into"
    ):
        export(network, tmp_path / "model.onnx", images=torch.tensor([0.0, 16.0]).view(2, 1, 1, 1))
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ImportError, match=r"export to ONNX needs onnxruntime: pip install 'mmlda\[onnx\]'"):
        export(network, tmp_path / "model.onnx", images=torch.rand(2, 1, 8, 8))


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda z: z[:, 0], r"\[2\] for 2 images"),
        (lambda z: z[:, :1], r"\[2, 1\] for 2 images"),
        (lambda z: (z, z), "a tuple for 2 images"),
    ],
)
def test_a_network_without_logits_is_named(change, got, network, images, tmp_path):
    with pytest.raises(ValueError, match=rf"model must return logits \[N, L\] of at least 2 classes, got {got}"):
        export(Wrong(network, change), tmp_path / "model.pt2", images=images)


class Loop(torch.nn.Module):
    def forward(self, x):
        return torch.stack([row.flatten()[:3] for row in x])


class Branch(torch.nn.Module):
    def forward(self, x):
        return x.flatten(1)[:, :3] if x.sum() > 0 else x.flatten(1)[:, 3:6]


class SingularValues(torch.nn.Module):
    def forward(self, x):
        return torch.linalg.svdvals(x[:, 0])


@pytest.mark.parametrize("suffix", [".onnx", ".pt2"])
@pytest.mark.parametrize(("model", "got"), [(Loop(), "Constraints violated"), (Branch(), "Could not guard")])
def test_a_network_that_cannot_be_traced_is_named(model, got, suffix, images, tmp_path):
    text = rf"model must be traceable by torch.export \(no loops over the batch or branches on values\), got \w+: {got}"
    with pytest.raises(ValueError, match=text) as caught:
        export(model, tmp_path / f"m{suffix}", images=images)
    assert got in str(caught.value.__cause__) and "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_an_operation_that_onnx_has_not_is_named(images, tmp_path):
    with pytest.raises(ValueError, match=r"model must consist of operations that ONNX has \(.pt2 has all\), got .*svd"):
        export(SingularValues(), tmp_path / "m.onnx", images=images)
    assert export(SingularValues(), tmp_path / "m.pt2", images=images).is_file()


def test_the_path_is_a_file_and_may_begin_with_the_home_folder(network, images, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert export(network, "~/m.pt2", images=images) == tmp_path / "m.pt2"
    (tmp_path / "folder.onnx").mkdir()
    with pytest.raises(ValueError, match=r"path must be a file, got '.*folder.onnx'"):
        export(network, tmp_path / "folder.onnx", images=images)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder.onnx", "m.pt2"]


def test_the_command(network, tmp_path, capsys, monkeypatch):
    from mmlda import cli

    def command(*words):
        monkeypatch.setattr(sys, "argv", ["mmlda", "export", *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return stop.value.code or 0, capsys.readouterr()

    code, said = command("mnist-sr", tmp_path / "m.pt2", "--root", tmp_path)
    assert code == 0 and said.out.strip() == str(tmp_path / "m.pt2")
    assert (tmp_path / "m.pt2").stat().st_size > 1e6
    mmlda.save(network, tmp_path / "own")  # trained on data that the file does not name
    code, said = command(tmp_path / "own", tmp_path / "own.pt2")
    assert code == 2 and "images must be given (--data on the command line)" in said.err
    assert command(tmp_path / "own", tmp_path / "own.pt2", "--data", "digits")[0] == 0
    assert (tmp_path / "own.pt2").is_file()
