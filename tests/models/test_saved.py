"""Networks from files: what is described is checked before it is built."""

import pytest
import torch

import mmlda
from mmlda.models import build, saved
from mmlda.theory import separated_means

CONFIG = {"backbone": "conv_net", "width": 4, "head": "mmlda", "dim": 12}


@pytest.mark.parametrize(
    "config", [CONFIG, {**CONFIG, "head": "softmax", "dim": 8}, {"backbone": "resnet", "depth": 8}]
)
def test_a_network_is_restored(config):
    model = build(config, seed=0)
    again = saved.restore(model.config, model.state_dict(), "here")
    assert again.config == model.config
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values()))


@pytest.mark.parametrize(
    "change, words",
    [
        ({"width": 5}, r"backbone\.layers\.0\.weight must be \[5, 1, 3, 3\], got \[4, 1, 3, 3\]"),
        ({"width": 1 << 20}, "backbone.layers.0.weight must be"),  # would take terabytes
        ({"width": 0}, "weights must fit"),
        ({"num_classes": 1 << 20}, "head.means must be"),
        ({"dim": 1 << 20}, "head.means must be"),
        ({"latent": False}, "weights must fit"),
        ({"head": "softmax"}, "head.weight must be"),
        ({"backbone": "resnet", "depth": 1202}, "weights must fit|setting"),
        ({"depth": 9}, "config must be settings of conv_net"),
        ({"C": 0}, "C must be a finite number > 0"),
        ({"std": [0.0]}, "std must be positive"),
        ({"C": "100"}, "C must be float"),
        ({"seed": 3}, "setting of model must be one of"),
    ],
)
def test_a_description_that_does_not_fit_the_weights_is_refused_before_it_is_built(change, words):
    weights = build(CONFIG, seed=0).state_dict()
    with pytest.raises(ValueError, match=words):
        saved.restore({**CONFIG, **change}, weights, "here")


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int32])
def test_weights_that_are_not_floats_are_refused(dtype):
    weights = build(CONFIG, seed=0).state_dict()
    weights["latent.bias"] = weights["latent.bias"].to(dtype)
    with pytest.raises(ValueError, match=f"weights must fit the network, got 'here': latent.bias is {dtype}"):
        saved.restore(CONFIG, weights, "here")


def test_means_come_from_the_weights(monkeypatch):
    """Means of many classes in few dimensions would be searched for, which takes minutes."""
    model = build({**CONFIG, "num_classes": 30}, seed=0)
    monkeypatch.setattr("mmlda.models.heads.max_mahalanobis.separated_means", None)
    again = saved.restore({**CONFIG, "num_classes": 30}, model.state_dict(), "here")
    assert torch.equal(again.head.means, model.head.means) and separated_means is not None


def test_a_network_file_with_another_description_is_refused(tmp_path):
    path = mmlda.save(build({"backbone": "resnet", "depth": 8, "width": 4}, seed=0), tmp_path)
    content = path.read_bytes()
    for old, new in ((b"false", b"true "), (b"resnet", b"resmet"), (b"mmlda", b"mmldb")):
        assert old in content
        path.write_bytes(content.replace(old, new, 1))
        with pytest.raises(ValueError, match=r"model\.safetensors"):
            mmlda.load(tmp_path)
