"""compiled(): the same network to an attack, a copy to its owner; and C&W under rounding on CUDA."""

import copy
import subprocess
import sys

import attack_models
import pytest
import torch
from torch import nn

import mmlda
from mmlda.attacks import BIM, CarliniWagner, WorstCase, compiled, replay
from mmlda.models import folded

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@pytest.fixture(scope="module")
def network():
    return attack_models.network("mm")


def test_attacks_find_the_same(network):
    x, y = attack_models.images(40)
    model, x = copy.deepcopy(network).double(), x.double()
    fast = compiled(model, backend="eager")
    assert torch.allclose(fast(x), model(x), rtol=1e-10)
    for attack in (BIM(eps=0.1), CarliniWagner(search_steps=2, steps=40), WorstCase(eps=0.1, attacks=[BIM(eps=0.1)])):
        ours, theirs = attack(fast, x, y), attack(model, x, y)
        assert torch.allclose(ours.x_adv, theirs.x_adv, atol=1e-6) and torch.equal(ours.success, theirs.success)
        assert ours.success.any()


@pytest.mark.parametrize(("preactivation", "left"), [(False, 0), (True, 4)])
def test_batch_norms_are_folded_into_the_convolutions_of_the_copy(preactivation, left):
    torch.manual_seed(0)
    backbone = mmlda.models.resnet(8, preactivation=preactivation)
    for norm in (module for module in backbone.modules() if isinstance(module, nn.BatchNorm2d)):
        for value in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
            nn.init.uniform_(value, 0.5, 1.5)
    model = mmlda.Classifier(backbone, mmlda.SoftmaxHead(num_classes=10, dim=64)).double()  # in train mode
    before = copy.deepcopy(model.state_dict())
    fast, x = compiled(model), torch.rand(3, 3, 8, 8, dtype=torch.float64)
    assert sum(isinstance(module, nn.BatchNorm2d) for module in fast.modules()) == left
    assert not any(module.training for module in fast.modules()) and all(m.training for m in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    y = torch.tensor([0, 1, 2])
    assert torch.allclose(fast(x), model.eval()(x), rtol=1e-10)
    ours, theirs = (BIM(eps=0.01)(network, x, y) for network in (fast, model))
    assert torch.allclose(ours.x_adv, theirs.x_adv, atol=1e-9) and (ours.x_adv != x).any()
    assert torch.allclose(compiled(fast)(x), fast(x), rtol=1e-10)  # nothing is left to fold
    backbone.norm = nn.GroupNorm(2, backbone.norm.num_features).double()  # nor can every norm be folded
    assert torch.allclose(compiled(model)(x), model(x), rtol=1e-10)
    with pytest.raises(ValueError, match="model must be a torch"):
        compiled(lambda x: x)


@pytest.mark.parametrize("first", [True, False])
def test_tf32_may_be_forbidden_and_allowed_between_calls(first, monkeypatch):
    """The choice made on CUDA, with stand-ins for the kernels, whose logits are 0, and for the compiler."""
    made = []
    monkeypatch.setattr(replay, "compile_quietly", lambda model, **options: model)
    monkeypatch.setattr(folded, "foldable", lambda model, shape: True)
    monkeypatch.setattr(folded, "agrees", lambda model, x, kind: True)
    monkeypatch.setattr(folded, "folded", lambda model, kind: made.append(kind) or (lambda x: x.new_zeros(len(x), 10)))
    model = mmlda.Classifier(mmlda.models.resnet(8), mmlda.SoftmaxHead(num_classes=10, dim=64)).eval()
    fast = replay._Compiled(model, "inductor").eval()
    x = torch.rand(3, 3, 8, 8)
    for allowed in (first, not first, first, not first):
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", allowed)
        with torch.no_grad():
            want = model(x)
            assert torch.allclose(fast(x), 0 * want if allowed else want, atol=1e-5)
    assert made == [torch.float16]  # once


def test_convolutions_that_somebody_has_changed():
    """Batch norm folded into them, a filter spread out: no longer what the fast programs compute."""
    model = mmlda.Classifier(mmlda.models.resnet(8), mmlda.SoftmaxHead(num_classes=10, dim=64)).eval()
    block, x = model.backbone.blocks[1], torch.rand(3, 3, 32, 32)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
        want = model(x)
        block.conv1, block.norm1 = nn.utils.fusion.fuse_conv_bn_eval(block.conv1, block.norm1), nn.Identity()
        assert block.conv1.bias is not None
        assert torch.allclose(model(x), want, atol=1e-4)
        assert torch.allclose(compiled(model, backend="eager")(x), want, atol=1e-4)
        block.conv2.dilation = block.conv2.padding = (2, 2)
        assert not torch.allclose(model(x), want, atol=1e-3)
        assert torch.allclose(compiled(model, backend="eager")(x), model(x), atol=1e-4)


def test_the_model_stays_as_it_was():
    model = copy.deepcopy(attack_models.network("sr")).train()
    before = {name: (t.detach().clone(), t.requires_grad) for name, t in model.named_parameters()}
    fast = compiled(model, backend="eager")
    x, y = attack_models.images(8)
    BIM(eps=0.1)(fast, x, y)
    assert model.training and not fast.training
    assert not any(p.requires_grad for p in fast.parameters())
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name][0]) and p.requires_grad == before[name][1] and p.grad is None
    logits = fast(x)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert torch.equal(fast(x), logits)  # the copy has the weights of when it was made


def test_compiling_leaves_the_checks_of_distributions_on():
    code = """
import torch
from mmlda.attacks import compiled
from mmlda import MaxMahalanobisDistribution
model = compiled(torch.nn.Linear(4, 3), backend="eager")
model(torch.zeros(2, 4))
try:
    MaxMahalanobisDistribution(num_classes=3, dim=4, priors=[1.0, 1.0, 1.0])
except ValueError:
    print("checked")
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.strip() == "checked", run.stderr


def test_a_function_has_no_copy():
    with pytest.raises(ValueError, match=r"model must be a torch\.nn\.Module"):
        compiled(lambda x: x)


def test_compiled_for_any_number_of_images():
    """One program with gradients serves every batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)).eval()
    fast = compiled(model, backend="aot_eager")
    fast(torch.rand(2, 1, 8, 8))
    torch._dynamo.utils.counters.clear()
    for n in (20, 17, 33):
        x = torch.rand(n, 1, 8, 8)
        y = model(x).argmax(1)
        ours, theirs = BIM(eps=0.05)(fast, x, y), BIM(eps=0.05)(model, x, y)
        assert torch.allclose(ours.x_adv, theirs.x_adv, atol=1e-5)
    assert 1 <= torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2  # with and without gradients


@cuda
@pytest.mark.parametrize("n", [1, 31, 300])
def test_compiled_on_cuda(n):
    model = mmlda.load("cifar10-sr").cuda()
    x = torch.rand(n, 3, 32, 32, generator=torch.Generator().manual_seed(0)).cuda()
    fast = compiled(model)
    with torch.no_grad():
        want, exact = model(x), copy.deepcopy(model).double()(x.double())
        assert (fast(x) - want).abs().max() < 0.02 * want.abs().max()
        off = [(z - exact).abs().mean() for z in (fast(x), want)]  # half precision, and cuDNN's TF32
        assert 0 < off[0] < 1.5 * off[1] and off[0] != off[1]
        torch.backends.cudnn.allow_tf32, before = False, torch.backends.cudnn.allow_tf32
        try:
            assert (fast(x) - exact).abs().mean() < 0.01 * off[0]  # also after it was compiled
        finally:
            torch.backends.cudnn.allow_tf32 = before
    y = want.argmax(1)
    result = BIM(eps=0.02)(fast, x, y)
    with torch.no_grad():
        still = model(result.x_adv).argmax(1) == y
    assert (still == ~result.success).double().mean() > 0.98
    assert result.success.double().mean() > 0.9


@cuda
def test_rounding_on_cuda_loses_no_sample():
    """TF32 and kernels that differ from batch to batch: what C&W reports as across is across for the model alone."""
    model = mmlda.load("cifar10-mmlda").cuda()
    x = torch.rand(100, 3, 32, 32, generator=torch.Generator().manual_seed(1)).cuda()
    with torch.no_grad():
        y = model(x).argmax(1)
    result = CarliniWagner(search_steps=6, steps=300)(model, x, y)
    assert result.success.all()
    with torch.no_grad():
        again = torch.cat([model(part).argmax(1) for part in result.x_adv.split(7)])
    assert (again != y).double().mean() > 0.97


@cuda
def test_a_capture_has_the_memory_that_the_allocator_keeps():
    """Kept memory of another pool can't serve a capture, nor be given back during one."""
    model = mmlda.load("cifar10-sr").cuda()
    x = torch.rand(2000, 3, 32, 32, device="cuda")
    y = torch.zeros(2000, dtype=torch.int64, device="cuda")
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    rest = 12 << 30  # enough for one call's graphs, and not for those of a second beside them
    kept = torch.empty(max(0, free - rest), dtype=torch.uint8, device="cuda")
    del kept
    for _ in range(4):
        assert BIM(eps=0.02, steps=2)(model, x, y).success.any()
