"""Options of a network: features on a sphere, and the activation of a Resnet."""

import pytest
import torch
import torch.nn.functional as F

from mmlda.models import build

X = torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
SPHERE = {"backbone": "conv_net", "width": 4, "dim": 12, "normalize": True}


@pytest.mark.parametrize("head, radius", [({"head": "mmlda", "C": 9.0}, 3.0), ({"head": "softmax"}, 1.0)])
def test_normalized_features_lie_on_the_sphere_of_the_means(head, radius):
    config = {**SPHERE, **head, "latent": True}
    model, free = build(config, seed=0).eval(), build({**config, "normalize": False}, seed=0).eval()
    z = model.features(X)
    torch.testing.assert_close(z.norm(dim=1), torch.full((6,), radius))
    torch.testing.assert_close(z / radius, F.normalize(free.features(X), dim=1))  # only the length changes
    assert not torch.allclose(free.features(X).norm(dim=1), torch.full((6,), radius), rtol=0.01)
    assert model.config["normalize"] is True and "normalize" not in free.config
    again = build(model.config, seed=0).eval()
    assert again.config == model.config and torch.equal(again(X), model(X))


@pytest.mark.parametrize("preactivation", [False, True])
def test_silu_replaces_every_relu(preactivation):
    config = {"backbone": "resnet", "depth": 8, "width": 4, "channels": 1, "preactivation": preactivation}
    smooth, plain = build({**config, "activation": "silu"}, seed=0).eval(), build(config, seed=0).eval()
    assert smooth.config["activation"] == "silu" and "activation" not in plain.config
    again = build(smooth.config, seed=0).eval()
    assert torch.equal(again(X), smooth(X)) and not torch.allclose(smooth(X), plain(X), atol=1e-3)
    assert (plain.backbone(X) >= 0).all() and (smooth.backbone(X) < 0).any()


def test_other_activations_are_refused():
    with pytest.raises(ValueError, match="activation must be one of relu, silu, got 'tanh'"):
        build({"backbone": "resnet", "depth": 8, "activation": "tanh"})
