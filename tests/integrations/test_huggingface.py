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


def test_pickles_are_not_read(tmp_path):
    HubClassifier.of(build(CONFIGS[0])).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"source must be a folder or repository with config.json and model.safetens"):
        HubClassifier.from_pretrained(tmp_path)


def test_mistakes_are_named(tmp_path):
    with pytest.raises(ValueError, match="model must be a Classifier, got 'Linear'"):
        HubClassifier.of(torch.nn.Linear(2, 2))
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
