"""Networks in Hugging Face's layout, on local folders."""

import json
import subprocess
import sys

import pytest
import torch

import mmlda
from mmlda.models import build

pytest.importorskip("huggingface_hub", reason="the extra mmlda[huggingface] is not installed")

from mmlda.integrations.huggingface import HubClassifier

CONFIGS = [
    {"backbone": "conv_net", "head": "mmlda", "num_classes": 10, "dim": 16, "C": 50.0},
    {"backbone": "conv_net", "head": "softmax", "num_classes": 3, "dim": 16, "latent": True},
    {"backbone": "mlp", "inputs": 4, "hidden": [8], "num_classes": 3, "priors": [0.5, 0.25, 0.25]},
]


@pytest.mark.parametrize("config", CONFIGS)
def test_save_and_load_again(config, tmp_path):
    model = build(config, seed=0).eval()
    HubClassifier.of(model).save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors", "README.md"}
    assert json.loads((tmp_path / "config.json").read_text()) == model.config
    again = HubClassifier.from_pretrained(tmp_path)
    x = torch.rand(3, 4) if config["backbone"] == "mlp" else torch.rand(3, 1, 8, 8)
    assert isinstance(again, mmlda.Classifier) and not again.training
    assert torch.equal(again(x), model(x))


def test_networks_that_ship_load_and_are_described(tmp_path):
    model = HubClassifier.from_pretrained("mnist-mmlda")
    model.save_pretrained(tmp_path)
    again, x = HubClassifier.from_pretrained(str(tmp_path)), torch.rand(2, 1, 28, 28)
    assert torch.equal(again(x), mmlda.load("mnist-mmlda")(x))
    card, about = (tmp_path / "README.md").read_text(), mmlda.zoo.about("mnist-mmlda")
    assert card.startswith("---\n") and "library_name: mmlda" in card and "- mnist" in card
    assert f"| test accuracy | {100 * about['accuracy']:.2f}% on 10,000 images |" in card
    assert f"steps {about['recipe']['steps']}" in card and "[]" not in card


def test_mmlda_reads_the_folder_too(tmp_path):
    model = build(CONFIGS[1], seed=0).eval()
    model.classes = ("a", "b", "c")
    HubClassifier.of(model).save_pretrained(tmp_path)
    again, x = mmlda.load(tmp_path), torch.rand(3, 1, 8, 8)
    assert torch.equal(again(x), model(x)) and again.classes == ("a", "b", "c")


def test_the_card_of_an_own_network_has_what_is_known(tmp_path):
    HubClassifier.of(build(CONFIGS[0]), data="digits", accuracy=0.975).save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert "| dataset | digits |" in card and "| test accuracy | 97.50% |" in card and "| recipe |" not in card


def test_the_facts_are_kept(tmp_path):
    facts = {"name": "mine", "data": "digits", "accuracy": 0.975, "test_images": 360, "recipe": {"steps": 60}}
    HubClassifier.of(build(CONFIGS[0]), **facts).save_pretrained(tmp_path)
    again = HubClassifier.from_pretrained(tmp_path)
    assert again.card == facts
    again.save_pretrained(tmp_path / "copy")
    assert (tmp_path / "copy" / "README.md").read_text() == (tmp_path / "README.md").read_text()
    model = build(CONFIGS[0])
    assert HubClassifier(model.backbone, model.head).card == {}
    (tmp_path / "card.json").write_text('{"accuracy": "high"}')
    with pytest.raises(ValueError, match=r"card.json: accuracy must be float, got 'high'"):
        HubClassifier.from_pretrained(tmp_path)


@pytest.mark.parametrize("accuracy", [97.0, -0.1, float("nan"), float("inf")])
def test_the_accuracy_is_a_share(accuracy, tmp_path):
    with pytest.raises(ValueError, match=rf"accuracy must be in \[0, 1\], got {accuracy}"):
        HubClassifier.of(build(CONFIGS[0]), accuracy=accuracy)
    hub = HubClassifier.of(build(CONFIGS[0]), accuracy=1.0)
    with pytest.raises(ValueError, match=r"accuracy must be in \[0, 1\]"):
        hub.save_pretrained(tmp_path / "new", model_card_kwargs={"accuracy": accuracy})
    assert not (tmp_path / "new").exists()
    hub.save_pretrained(tmp_path)
    (tmp_path / "card.json").write_text(json.dumps({"accuracy": accuracy}))
    with pytest.raises(ValueError, match=r"card.json"):
        HubClassifier.from_pretrained(tmp_path)


def trained(model):
    digits = mmlda.data.load("digits")[0]
    mmlda.fit(model, digits, mmlda.Recipe(steps=1, optimizer="adam", lr=1e-3), show=False)
    return model


@pytest.mark.parametrize("change", [lambda model: model.with_priors([0.91] + [0.01] * 9), trained])
def test_a_changed_network_loses_what_was_measured(change, tmp_path):
    facts = {"name": "mine", "data": "digits", "accuracy": 0.975, "test_images": 360, "recipe": {"steps": 60}}
    HubClassifier.of(build(CONFIGS[0]), **facts).save_pretrained(tmp_path)
    changed = change(HubClassifier.from_pretrained(tmp_path))
    with pytest.warns(UserWarning, match=r"the card leaves out accuracy, test_images, recipe; HubClassifier") as caught:
        changed.save_pretrained(tmp_path)
    assert caught[0].filename == __file__
    card = (tmp_path / "README.md").read_text()
    assert "# mine" in card and "| dataset | digits |" in card and "accuracy" not in card and "steps" not in card
    assert HubClassifier.from_pretrained(tmp_path).card == {"name": "mine", "data": "digits"}
    HubClassifier.of(changed, accuracy=0.5).save_pretrained(tmp_path)
    assert "| test accuracy | 50.00% |" in (tmp_path / "README.md").read_text()


def test_the_same_weights_elsewhere_keep_what_was_measured(tmp_path):
    hub = HubClassifier.of(build(CONFIGS[0]), accuracy=0.975)
    hub.double().with_priors(None).save_pretrained(tmp_path)
    assert HubClassifier.from_pretrained(tmp_path).card == {"accuracy": 0.975}


def test_the_card_of_a_network_on_a_table_says_what_it_takes(tmp_path):
    model = build(CONFIGS[2])
    HubClassifier.of(model).save_pretrained(tmp_path)
    assert "From rows of numbers to logits." in (tmp_path / "README.md").read_text()
    model.bounds = torch.tensor([[0.0] * 4, [9.0] * 4], dtype=torch.float64)
    HubClassifier.of(model).save_pretrained(tmp_path)
    text = "From rows [N, 4] in [0, 1], each column scaled by its `bounds` in `config.json`, to logits."
    assert text in (tmp_path / "README.md").read_text()
    assert json.loads((tmp_path / "config.json").read_text())["bounds"] == model.bounds.tolist()


def test_a_second_network_replaces_the_card_of_the_first_but_no_other_readme(tmp_path):
    HubClassifier.of(build(CONFIGS[0]), data="digits").save_pretrained(tmp_path)
    HubClassifier.of(build(CONFIGS[1])).save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert "softmax head, 3 classes" in card and "digits" not in card
    assert HubClassifier.from_pretrained(tmp_path).card == {}
    (tmp_path / "README.md").write_text("# My project\n")
    HubClassifier.of(build(CONFIGS[0])).save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "# My project\n"


def test_the_card_names_the_repository(tmp_path, monkeypatch):
    uploaded = []

    class Api:
        def __init__(self, token=None):
            pass

        def create_repo(self, repo_id, **options):
            return type("Repository", (), {"repo_id": repo_id})

        def upload_folder(self, folder_path, **options):
            uploaded.append((folder_path / "README.md").read_text())

    monkeypatch.setattr("huggingface_hub.hub_mixin.HfApi", Api)
    hub = HubClassifier.of(build(CONFIGS[0]))
    hub.push_to_hub("me/network")
    hub.save_pretrained(tmp_path / "one", repo_id="me/network", push_to_hub=True)
    hub.save_pretrained(tmp_path / "two", repo_id="me/network")
    cards = [*uploaded, *((tmp_path / name / "README.md").read_text() for name in ("one", "two"))]
    assert len(cards) == 4 and all('from_pretrained("me/network")' in card for card in cards)


def test_repositories_are_downloaded(tmp_path, monkeypatch):
    from mmlda.integrations import huggingface

    HubClassifier.of(build(CONFIGS[0])).save_pretrained(tmp_path)
    asked = []
    monkeypatch.setattr(huggingface, "snapshot_download", lambda *args, **options: asked.append(options) or tmp_path)
    assert HubClassifier.from_pretrained("me/network", revision="v1").num_classes == 10
    assert asked[0]["revision"] == "v1" and "model.safetensors" in asked[0]["allow_patterns"]
    for source in ("./nope", "/nope/nope", tmp_path / "nope"):
        with pytest.raises(ValueError, match=r"source must be a folder or repository .*, got '.*nope'"):
            HubClassifier.from_pretrained(source)
    assert len(asked) == 1


def test_what_is_not_there_is_one_sentence(tmp_path, monkeypatch):
    from huggingface_hub import errors

    from mmlda.integrations import huggingface

    def answer(kind):
        def ask(*args, **options):
            raise kind.__new__(kind)

        return ask

    for kind, why in [
        (errors.LocalEntryNotFoundError, "not downloaded yet, and the Hub was not reached"),
        (errors.RepositoryNotFoundError, "the Hub has none that you may read"),
        (errors.GatedRepoError, "the Hub has none that you may read"),
        (errors.RevisionNotFoundError, "the Hub has none that you may read"),
    ]:
        monkeypatch.setattr(huggingface, "snapshot_download", answer(kind))
        text = rf"source must be a folder or repository with config.json and model.safetensors, got 'nope' \({why}\)"
        with pytest.raises(ValueError, match=text) as caught:
            HubClassifier.from_pretrained("nope")
        assert type(caught.value) is ValueError and isinstance(caught.value.__cause__, kind)

    HubClassifier.of(build(CONFIGS[0])).save_pretrained(tmp_path / "network")
    monkeypatch.setattr(huggingface, "snapshot_download", lambda *args, **options: pytest.fail("the Hub was asked"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"source must be a folder or repository .*, got 'network/model.safetensors'$"):
        HubClassifier.from_pretrained("network/model.safetensors")


def test_folders_of_runs_and_of_save_load_too(tmp_path):
    x = torch.rand(2, 1, 8, 8)
    model = build(CONFIGS[0], seed=0)
    mmlda.save(model, tmp_path / "saved")
    assert torch.equal(HubClassifier.from_pretrained(tmp_path / "saved")(x), model.eval()(x))
    run = tmp_path / "run"
    data = mmlda.data.load("digits")[0]
    mmlda.fit(model, data, mmlda.Recipe(steps=2, optimizer="adam", lr=1e-3), out=run, show=False)
    hub = HubClassifier.from_pretrained(run)
    assert torch.equal(hub(x), mmlda.load(run)(x)) and hub.card == {"data": "digits"}


def test_options_of_from_pretrained(tmp_path):
    HubClassifier.of(build(CONFIGS[0]).double()).save_pretrained(tmp_path)
    for source in (tmp_path, "mnist-mmlda"):
        assert HubClassifier.from_pretrained(source, device="meta").mean.device.type == "meta"
        with pytest.raises(ValueError, match=r"device must be available, got 'cuda:99' \("):
            HubClassifier.from_pretrained(source, device="cuda:99")
        for options in ({"foo": 1}, {"map_location": "cpu"}):
            with pytest.raises(ValueError, match=r"option must be one of device, revision, token, .*, got "):
                HubClassifier.from_pretrained(source, **options)
    assert HubClassifier.from_pretrained(tmp_path).mean.dtype == mmlda.load(tmp_path).mean.dtype == torch.float32


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        (["a", "b"], r"config.json: classes must be 3 names, got \['a', 'b'\]"),
        ([1, 2, 3], r"config.json: classes must be Sequence\[str\], got \[1, 2, 3\]"),
        ("abc", r"config.json: classes must be Sequence\[str\], got 'abc'"),
    ],
)
def test_wrong_class_names_are_refused(classes, message, tmp_path):
    HubClassifier.of(build(CONFIGS[1])).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"classes": classes}))
    with pytest.raises(ValueError, match=message):
        HubClassifier.from_pretrained(tmp_path)


def test_pickles_are_not_read(tmp_path):
    HubClassifier.of(build(CONFIGS[0])).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"source must be a folder or repository with config.json and model.safetens"):
        HubClassifier.from_pretrained(tmp_path)


def test_mistakes_are_named(tmp_path):
    with pytest.raises(ValueError, match="model must be a Classifier, got 'Linear'"):
        HubClassifier.of(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="fact must be one of name, data, accuracy, test_images, recipe, got 'sort'"):
        HubClassifier.of(build(CONFIGS[0]), sort="fine")
    with pytest.raises(ValueError, match="source must be a folder or repository"):
        HubClassifier.from_pretrained(tmp_path)
    HubClassifier.of(build(CONFIGS[0])).save_pretrained(tmp_path)
    for damaged in ("{", "[]"):
        (tmp_path / "config.json").write_text(damaged)
        with pytest.raises(ValueError, match=r"config.json must be a JSON object, got a"):
            HubClassifier.from_pretrained(tmp_path)


def test_a_missing_extra_is_one_sentence():
    code = "import sys; sys.modules['huggingface_hub'] = None; import mmlda.integrations.huggingface"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert last == "ImportError: Hugging Face's layout needs huggingface_hub: pip install 'mmlda[huggingface]'"
