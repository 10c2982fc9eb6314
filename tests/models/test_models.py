"""Backbones, the Classifier around them, and swapped heads."""

import copy

import pytest
import torch
from torch import nn

from mmlda.models import Classifier, build, conv_net, resnet, resnet32, swap_head
from mmlda.models.heads import MaxMahalanobisHead, SoftmaxHead


def parameters(model):
    return sum(p.numel() for p in model.parameters())


COUNTS = [(20, 269_722), (32, 464_154), (44, 658_586), (56, 853_018), (110, 1_727_962)]


@pytest.mark.parametrize("depth, published", COUNTS)
def test_parameter_counts_are_the_published_ones(depth, published):
    """He 2015, Table 6, with option A shortcuts: 0.27, 0.46, 0.66, 0.85 and 1.7 million."""
    assert parameters(Classifier(resnet(depth), SoftmaxHead(num_classes=10, dim=64))) == published


def test_the_mm_lda_network_trades_the_softmax_layer_for_the_latent_layer():
    sr = Classifier(resnet32(), SoftmaxHead(num_classes=10, dim=64))
    mm = Classifier(resnet32(), MaxMahalanobisHead(num_classes=10, dim=64))
    assert parameters(mm) == parameters(sr) - (64 * 10 + 10) + (64 * 64 + 64)


@pytest.mark.parametrize("preactivation", [False, True])
@pytest.mark.parametrize("channels, size", [(1, 8), (3, 9), (1, 28), (3, 32), (4, 33)])
def test_any_channels_and_size_from_8(channels, size, preactivation):
    net = resnet(8, channels=channels, preactivation=preactivation)
    assert net(torch.rand(2, channels, size, size)).shape == (2, 64)
    with pytest.raises(ValueError, match="H, W >= 8"):
        net(torch.rand(2, channels, 7, 8))


def test_post_activation_block_is_the_formula():
    """relu(x + BN(conv(relu(BN(conv(x)))))), and pre-activation x + conv(relu(BN(conv(relu(BN(x))))))."""
    torch.manual_seed(0)
    x = torch.randn(4, 16, 8, 8)
    for preactivation in (False, True):
        block = resnet(8, preactivation=preactivation).blocks[0].train()
        c1, c2, n1, n2 = block.conv1, block.conv2, block.norm1, block.norm2
        if preactivation:
            expected = x + c2(n2(c1(n1(x).relu())).relu())
        else:
            expected = (x + n2(c2(n1(c1(x)).relu()))).relu()
        torch.testing.assert_close(block(x), expected)


def test_the_shortcut_across_stages_subsamples_and_pads_with_zeros():
    block = resnet(8).blocks[1]  # 16 -> 32, stride 2
    x = torch.randn(2, 16, 8, 8)
    y = block.shortcut(x)
    assert y.shape == (2, 32, 4, 4)
    torch.testing.assert_close(y[:, 8:24], x[:, :, ::2, ::2])
    assert not y[:, :8].any() and not y[:, 24:].any()


def test_scaling_is_inside():
    seen = []

    class Backbone(nn.Module):
        num_features = 4

        def forward(self, x):
            seen.append(x)
            return x.mean((2, 3))[:, [0, 0, 0, 0]]

    x = torch.rand(3, 1, 8, 8)
    model = Classifier(Backbone(), SoftmaxHead(num_classes=3, dim=4))
    model(x)
    torch.testing.assert_close(seen[0], x - 0.5)  # the paper's [-0.5, 0.5]
    Classifier(Backbone(), SoftmaxHead(num_classes=3, dim=4), mean=(0.25,), std=(0.5,))(x)
    torch.testing.assert_close(seen[1], (x - 0.25) / 0.5)


def test_features_are_what_the_head_sees_and_take_either_sign():
    torch.manual_seed(0)
    model = Classifier(conv_net(), MaxMahalanobisHead(num_classes=10, dim=16)).eval()
    z = model.features(torch.rand(20, 1, 8, 8))
    assert z.shape == (20, 16) and (z < 0).any() and (z > 0).any()
    x = torch.rand(5, 1, 8, 8)
    torch.testing.assert_close(model(x), model.head(model.features(x)))


@pytest.mark.parametrize("head", ["mmlda", "softmax"])
@pytest.mark.parametrize("backbone", [{"backbone": "resnet", "depth": 8, "channels": 1}, {"backbone": "conv_net"}])
def test_a_config_makes_the_same_network_again(backbone, head):
    model = build({**backbone, "head": head, "num_classes": 7}, seed=3)
    assert "priors" not in model.config
    again = build(model.config)
    again.load_state_dict(model.state_dict())
    x = torch.rand(2, 1, 8, 8)
    assert torch.equal(again.eval()(x), model.eval()(x))


def test_priors_are_part_of_a_config():
    model = build({"backbone": "conv_net", "head": "mmlda", "num_classes": 3, "priors": [0.5, 0.25, 0.25]})
    torch.testing.assert_close(build(model.config).head.priors, torch.tensor([0.5, 0.25, 0.25]))


def test_the_seed_decides_the_weights_and_leaves_the_global_generator_alone():
    config = {"backbone": "conv_net", "head": "mmlda"}
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    a, b, c = (build(config, seed=s).state_dict() for s in (1, 1, 2))
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(a[k], b[k]) for k in a) and any(not torch.equal(a[k], c[k]) for k in a)


@pytest.mark.parametrize(
    "change, word",
    [({"backbone": "vgg"}, "backbone"), ({"head": "svm"}, "head"), ({"depth": 33}, "depth"), ({"colour": 1}, "colour")],
)
def test_bad_configs_are_named(change, word):
    with pytest.raises(ValueError, match=word):
        build({"backbone": "resnet", "head": "mmlda", **change})


def test_a_backbone_without_num_features_is_refused():
    with pytest.raises(ValueError, match="num_features"):
        Classifier(nn.Flatten(), SoftmaxHead(num_classes=2, dim=4))
    with pytest.raises(ValueError, match=r"head\.dim must be .*, got 5"):
        Classifier(conv_net(), SoftmaxHead(num_classes=2, dim=5))


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.BatchNorm1d(20), nn.ReLU())
        self.attention = nn.MultiheadAttention(20, 2)  # its out_proj is an nn.Linear whose forward never runs
        self.head = nn.ModuleDict({"fc": nn.Linear(20, 1000)})

    def forward(self, x):
        return self.head["fc"](self.body(x))


def test_swap_head_replaces_the_last_linear_and_nothing_else():
    torch.manual_seed(0)
    old = Nested().eval()
    before = copy.deepcopy(old.state_dict())
    new = swap_head(old, num_classes=5)
    assert all(torch.equal(before[k], v) for k, v in old.state_dict().items())  # the one given is untouched
    rest = {k: v for k, v in before.items() if not k.startswith("head.fc.")}
    swapped = new.state_dict()
    assert all(torch.equal(v, swapped[k]) for k, v in rest.items())
    assert {k for k in swapped if not k.startswith("head.fc.")} == set(rest)
    assert new.head["fc"].replaced == "head.fc: Linear(in_features=20, out_features=1000, bias=True)"
    assert "replaced head.fc: Linear(in_features=20, out_features=1000" in str(new)
    x = torch.rand(3, 64)
    z = new.head["fc"].latent(new.body(x))
    torch.testing.assert_close(new(x), z @ new.head["fc"].head.means.T - torch.log(torch.tensor(5.0)))
    assert not list(new.head["fc"].head.parameters())


def test_swap_head_trains_the_rest():
    torch.manual_seed(0)
    new = swap_head(Nested(), num_classes=4, C=9.0, dim=3)
    loss = nn.functional.cross_entropy(new(torch.rand(8, 64)), torch.arange(8) % 4)
    loss.backward()
    assert new.body[1].weight.grad.abs().sum() > 0 and new.head["fc"].latent.weight.grad.abs().sum() > 0


def test_swap_head_takes_a_named_layer_and_another_head():
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3), nn.Linear(3, 2))
    new = swap_head(net, num_classes=3, layer="2", head=SoftmaxHead(num_classes=3, dim=8))
    assert isinstance(new[2].head, SoftmaxHead) and isinstance(new[3], nn.Linear)


def test_swap_head_on_a_single_layer_and_errors():
    assert swap_head(nn.Linear(8, 3), num_classes=3)(torch.rand(2, 8)).shape == (2, 3)
    with pytest.raises(ValueError, match=r"model must contain an nn.Linear"):
        swap_head(nn.ReLU(), num_classes=3)
    with pytest.raises(ValueError, match=r"layer must be the name of an nn.Linear, .*, got 'body'"):
        swap_head(Nested(), num_classes=3, layer="body")


@pytest.mark.parametrize("kind", ["mmlda", "softmax"])
def test_swap_head_on_a_network_with_a_latent_layer_and_a_head_changes_both(kind):
    x = torch.rand(3, 1, 8, 8)
    own = build({"backbone": "conv_net", "width": 4, "head": kind}, seed=0).eval()
    before = own(x)
    swapped = swap_head(nn.Sequential(conv_net(), nn.Linear(64, 10)), num_classes=10)
    for net in (own, nn.Sequential(nn.Identity(), own), swapped):
        new = swap_head(net, num_classes=5, C=9.0)
        assert new(x).shape == (3, 5)
        heads = [module for module in new.modules() if isinstance(module, MaxMahalanobisHead | SoftmaxHead)]
        assert [(type(head), head.num_classes) for head in heads] == [(MaxMahalanobisHead, 5)]
    new = swap_head(own, num_classes=12, head=SoftmaxHead(num_classes=12, dim=6))
    assert new.num_classes == 12 and build(new.config)(x).shape == (3, 12)
    assert torch.equal(new.backbone(x), own.backbone(x)) and torch.equal(own(x), before)
    assert new.backbone is not own.backbone


@pytest.mark.parametrize("settings", [{}, {"C": 4.0, "precision": 2.0}, {"dim": 9}, {"priors": [0.19] + [0.09] * 9}])
@pytest.mark.parametrize("kind", ["linear", "softmax with priors", "MM-LDA"])
def test_swap_head_can_keep_the_classifier(kind, settings):
    torch.manual_seed(0)
    heads = {"softmax with priors": SoftmaxHead(num_classes=10, dim=64, priors=[0.55] + [0.05] * 9)}
    heads["MM-LDA"] = MaxMahalanobisHead(num_classes=10, dim=20, C=9.0)
    old = Classifier(conv_net(), heads[kind]) if kind in heads else nn.Sequential(conv_net(), nn.Linear(64, 10))
    old.classes = tuple("abcdefghij")
    old, x = old.eval(), torch.rand(50, 1, 8, 8)
    new = swap_head(old, num_classes=10, keep=True, **settings).eval()
    assert torch.allclose(new(x).softmax(1), old(x).softmax(1), atol=1e-5) and new.classes == old.classes
    other = swap_head(old, num_classes=10, **settings).eval()
    assert not torch.allclose(other(x).softmax(1), old(x).softmax(1), atol=1e-2) and other.classes is None


def test_swap_head_refuses_to_keep_what_the_head_cannot_represent():
    net = nn.Sequential(nn.Flatten(), nn.Linear(8, 10))
    spoilt = MaxMahalanobisHead(num_classes=10, dim=9, priors=[0.0] + [1 / 9] * 9)
    for words, settings in (
        (r"dim must be at least num_classes - 1 = 9 with keep=True, got 8", {"num_classes": 10, "dim": 8}),
        (r"num_classes must be 10, as before, with keep=True, got 5", {"num_classes": 5}),
        (r"head must have means that span L - 1 dimensions and priors > 0", {"num_classes": 10, "head": spoilt}),
    ):
        with pytest.raises(ValueError, match=words):
            swap_head(net, keep=True, **settings)
    sphere = Classifier(conv_net(), SoftmaxHead(num_classes=10, dim=64), normalize=True)
    with pytest.raises(ValueError, match="keep must be False for a Classifier with normalize=True, got True"):
        swap_head(sphere, num_classes=10, keep=True)


def test_swap_head_needs_a_dimension_for_many_classes():
    net = nn.Sequential(nn.Flatten(), nn.Linear(8, 10))
    for L in (8193, 100_000):
        with pytest.raises(ValueError, match=f"^dim must be given for {L} classes, such as 512, got None$"):
            swap_head(net, num_classes=L)
    assert swap_head(net, num_classes=100_000, dim=512)(torch.rand(2, 8)).shape == (2, 100_000)


def test_swap_head_refuses_what_could_not_run():
    with pytest.raises(ValueError, match=r"layer must have a size, got the LazyLinear '1': run one batch"):
        swap_head(nn.Sequential(nn.Flatten(), nn.LazyLinear(5)), num_classes=5)
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(64, 8))
    backbone.num_features = 8
    own = Classifier(backbone, MaxMahalanobisHead(num_classes=3, dim=8))
    with pytest.raises(ValueError, match=r"layer must be None in a network with .*, got 'backbone\.1'"):
        swap_head(own, num_classes=5, layer="backbone.1")
    assert swap_head(own, num_classes=5, layer="latent")(torch.rand(2, 1, 8, 8)).shape == (2, 5)


@pytest.mark.parametrize("name", ["resnet18", "vgg11", "densenet121", "mobilenet_v2", "convnext_tiny", "vit_b_16"])
def test_swap_head_on_torchvision(name):
    torchvision = pytest.importorskip("torchvision", reason="torchvision is not installed here", exc_type=ImportError)
    model = swap_head(getattr(torchvision.models, name)(weights=None), num_classes=7).eval()
    assert model(torch.rand(2, 3, 224, 224)).shape == (2, 7)


TIMM = ["resnet18", "vit_tiny_patch16_224", "convnext_atto", "efficientnet_b0", "mixer_s32_224"]


@pytest.mark.parametrize("name", TIMM)
def test_swap_head_on_timm(name):
    timm = pytest.importorskip("timm", reason="timm is not installed here", exc_type=ImportError)
    model = swap_head(timm.create_model(name, pretrained=False), num_classes=7).eval()
    assert model(torch.rand(2, 3, 224, 224)).shape == (2, 7)


def test_predict_and_predict_proba_are_batched_and_leave_the_model_as_it_was():
    model = build({"backbone": "conv_net", "head": "mmlda"}, seed=0).train()
    model.backbone.layers[1].eval()
    modes = [module.training for module in model.modules()]
    x = torch.rand(11, 1, 8, 8)
    p, classes = model.predict_proba(x, batch_size=4), model.predict(x, batch_size=4)
    assert [module.training for module in model.modules()] == modes and not p.requires_grad
    z = model.eval()(x)
    torch.testing.assert_close(p, z.softmax(1))
    assert classes.dtype == torch.int64 and torch.equal(classes, z.argmax(1))
    with pytest.raises(ValueError, match="batch_size must be an integer >= 1, got 0"):
        model.predict(x, batch_size=0)


def test_predict_takes_arrays_and_bytes():
    model = build({"backbone": "conv_net", "width": 4}, seed=0)
    x = torch.randint(256, (6, 1, 8, 8), dtype=torch.uint8)
    expected = model.predict_proba(x.float() / 255)
    assert torch.equal(model.predict_proba(x), expected) and torch.equal(model.predict_proba(x.numpy()), expected)
    assert torch.equal(model.predict((x.float() / 255).double().numpy()), expected.argmax(1))


def test_an_mlp_refuses_rows_of_another_length():
    with pytest.raises(ValueError, match=r"x must have shape \[N, 4\], got \[2, 5\]"):
        build({"backbone": "mlp", "inputs": 4, "num_classes": 3})(torch.rand(2, 5))
